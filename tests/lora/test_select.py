"""Which maps the targets come to: PEFT's rule, expressions, patterns; and what is refused."""

import dataclasses

import pytest

from moejax.config import ConfigError, LoraConfig
from moejax.config.load import load_config
from moejax.lora import adapted_parts, adapter_rows, linear_maps, select_adapters
from moejax.models.hf_keys import DEEPSEEK, KIMI_K3, KIMI_LINEAR
from moejax.models.parts import model_parts
from tests.models.small_configs import small

HYBRID = model_parts(small("kda,kda,kda,dsa", 9))
MAPS = linear_maps(HYBRID, KIMI_K3)


def select(**fields):
    return select_adapters(LoraConfig(rank=4, **fields), MAPS, HYBRID.segments)


def names(selection) -> list[str]:
    return [t.map.name.partition("layers.")[2] for t in selection.targets]


def test_the_seeds_targets_are_kda_queries_and_keys_and_the_routers():
    got = names(select(targets=("q_proj", "k_proj", "gate")))
    kda = [i for i in range(9) if i % 4 != 3]
    want = {f"{i}.self_attn.{c}_proj" for i in kda for c in "qk"}
    want |= {f"{i}.block_sparse_moe.gate" for i in range(1, 9)}
    assert set(got) == want and len(got) == len(want)


def test_full_size_parameters_of_the_seeds_targets_are_the_published_count():
    cfg = load_config("kimi_k3", {"lora.rank": 8, "lora.targets": ("q_proj", "k_proj", "gate")})
    _, selection = adapted_parts(cfg)
    count = {row.module: row for row in adapter_rows(selection.targets)}
    assert count["q_proj"].parameters + count["k_proj"].parameters == 21_479_424
    assert count["gate"].parameters == 5_935_104
    assert (count["q_proj"].layers, count["gate"].layers) == (69, 92)


def test_a_suffix_ends_at_a_dot():
    assert not any("kv_b" in n or "f_b" in n for n in names(select(targets=("b_proj",))))
    assert names(select(targets=("3.self_attn.g_proj",))) == ["3.self_attn.g_proj"]
    with pytest.raises(ConfigError, match="'_proj' matches no linear map"):
        select(targets=("_proj",))


def test_a_regular_expression_is_for_the_whole_name():
    selection = select(target_regex=r".*layers\.[0-2]\.self_attn\.[qkv]_proj")
    assert len(names(selection)) == 9 and not selection.warnings
    with pytest.raises(ConfigError, match="matches no linear map"):
        select(target_regex=r"q_proj")


def test_every_linear_map_has_a_name_of_its_own_and_the_rest_has_none():
    found = {m.name.rpartition(".")[2] for m in MAPS}
    assert found == {
        "q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "g_proj", "b_proj", "o_proj",
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
        "wq_b", "wk", "weights_proj", "gate", "routed_expert_down_proj", "routed_expert_up_proj",
        "gate_proj", "up_proj", "down_proj", "gate_up_proj",
    }  # fmt: skip
    assert len({m.name for m in MAPS}) == len(MAPS)


def test_several_kinds_are_told_and_an_error_when_strict():
    selection = select(targets=("g_proj", "down_proj"))
    assert len(selection.warnings) == 2
    assert "kda attention, dsa attention" in selection.warnings[0]
    assert "dense feed-forward, shared experts" in selection.warnings[1]
    with pytest.raises(ConfigError, match="2 kinds: kda attention, dsa attention"):
        select(targets=("g_proj",), strict=True)
    assert not select(targets=("q_proj",), strict=True).warnings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"targets": ("q_porj",)}, "lora.targets: 'q_porj' matches no linear map; nearest: q_proj"),
        ({"targets": ("gate_up_proj",)}, "put it into lora.target_parameters"),
        ({"target_parameters": ("q_proj",)}, "lora.target_parameters: 'q_proj' matches no"),
        ({}, "lora.rank=4 but nothing is targeted"),
        ({"targets": ("kv_b_proj",), "dropout": 0.1}, "lora.dropout=0.1 does not go with"),
        ({"target_parameters": ("experts.down_proj",), "dropout": 0.1}, "routed experts read"),
        ({"targets": ("q_proj",), "alpha_pattern": (r"layers.1.*q_proj=3",)}, "layers of one scan"),
    ],
)
def test_what_cannot_be_is_one_line(fields, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as error:
        select(**fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entry", "field"),
    [("o_proj", "rank_pattern"), ("o_proj=1.5", "rank_pattern"), ("=4", "rank_pattern"),
     ("o_proj=0", "alpha_pattern"), ("[=2", "alpha_pattern")],
)  # fmt: skip
def test_bad_patterns_are_refused(entry, field):
    with pytest.raises(ConfigError, match=f"lora.{field} has"):
        LoraConfig(**{field: (entry,)})


def test_rank_and_alpha_patterns_give_the_scale():
    cfg = LoraConfig(rank=8, alpha=12.0, rslora=True, rank_pattern=("o_proj=4",),
                     alpha_pattern=("down_proj=20",))  # fmt: skip
    assert cfg.rank_of("model.layers.0.self_attn.o_proj") == 4
    assert cfg.scale_of("model.layers.0.self_attn.o_proj") == 12 / 2
    assert cfg.scale_of("model.layers.0.mlp.down_proj") == pytest.approx(20 / 8**0.5)
    plain = dataclasses.replace(cfg, rslora=False)
    assert plain.scale_of("model.layers.0.self_attn.o_proj") == 3
    assert plain.rank_of("model.layers.0.self_attn.qo_proj") == 8


def test_settings_without_effect_are_told():
    fields = {"rank_pattern": ("zzz=3",), "alpha_pattern": ("o_proj=3",), "shared_a": True}
    told = select(targets=("q_proj",), **fields).warnings
    assert [line.partition(":")[0].split()[0] for line in told] == [
        "lora.rank_pattern", "lora.alpha_pattern", "lora.shared_a"
    ]  # fmt: skip
    felt = {"alpha_pattern": ("q_proj=3",), "shared_a": True}
    assert not select(
        targets=("q_proj",), target_parameters=("experts.down_proj",), **felt
    ).warnings


def test_layers_of_a_scan_that_are_not_chosen_have_rank_0():
    plan = select(targets=("5.self_attn.q_proj",)).plan
    (spec,) = (spec for runs in plan for specs in runs for spec in specs)
    ranks = [r for ranks in spec.ranks for r in ranks]
    assert len(ranks) > 1 and sorted(ranks)[-2:] == [0, 4]


@pytest.mark.parametrize("spelling", [DEEPSEEK, KIMI_LINEAR, KIMI_K3])
def test_adapter_names_do_not_depend_on_the_spelling(spelling):
    assert [m.path for m in linear_maps(HYBRID, spelling)] == [m.path for m in MAPS]


def test_the_indexer_is_adapted_only_where_it_learns():
    frozen = load_config("tiny", {"lora.rank": 2, "lora.targets": ("wk",)})
    dsa = frozen.model.dsa.replace(stage="frozen")
    with pytest.raises(ConfigError, match="leaves the indexer as it is"):
        adapted_parts(frozen.replace(model=frozen.model.replace(dsa=dsa)))
    parts, _ = adapted_parts(load_config("tiny", {"lora.rank": 2, "lora.targets": ("q_b_proj",)}))
    assert parts.cfg.dsa.stage == "frozen"
