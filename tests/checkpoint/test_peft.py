"""Adapters in PEFT's form: against what PEFT itself wrote and merged, and in our own hands."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import CheckpointError
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.peft_config import read_config, shortest_ends, write_config
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import (
    LowRank,
    join_halves,
    pack_experts,
    stack_experts,
    unpack_experts,
)
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_write import write_peft
from tests.models.published import FOLDER, source

LORA = FOLDER / "lora"
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def names_of(name: str) -> PeftNames:
    found = source(name)
    return PeftNames(found.parts, found.map.spelling, found.raw_config["model_type"])


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """The maps of the model that PEFT's adapter was made for."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copy(LORA / "kimi_linear" / "config.json", folder)
    shutil.copy(LORA / "kimi_linear" / "base_model.safetensors", folder / "model.safetensors")
    found = HfSource(folder)
    return PeftNames(found.parts, found.map.spelling, "kimi_linear")


@pytest.fixture
def copy(tmp_path):
    """PEFT's adapter, to be damaged; returns a function that changes it and gives the folder."""
    folder = tmp_path / "adapter"
    shutil.copytree(LORA / "kimi_linear", folder)

    def change(config=None, tensors=None, drop=()):
        raw = json.loads((folder / CONFIG).read_text()) | (config or {})
        (folder / CONFIG).write_text(json.dumps({k: v for k, v in raw.items() if k not in drop}))
        if tensors:
            all_ = load_file(folder / TENSORS)
            save_file({k: v for k, v in tensors(all_).items()}, folder / TENSORS)
        return folder

    return change


def random_low(one, rank, seed, scale=2.0):
    """An adapter of one map, every number of it different."""
    rng = np.random.default_rng(seed)
    lead = (one.num_experts,) if one.num_experts else ()
    a = rng.standard_normal((*lead, rank, one.in_size)).astype(np.float32)
    b = rng.standard_normal((*lead, one.out_size, rank)).astype(np.float32)
    return LowRank(a, b, scale)


def test_merged_weights_are_those_of_peft(kimi):
    adapter = PeftFolder(LORA / "kimi_linear", kimi)
    base = load_file(LORA / "kimi_linear" / "base_model.safetensors")
    for key, want in load_file(LORA / "kimi_linear" / "merged_changed_weights.safetensors").items():
        module = key.removesuffix(".weight")
        if ".experts." in key:
            prefix, expert, word = module.rsplit(".", 2)
            low = adapter.read(prefix + (".down_proj" if word == "w2" else ".gate_up_proj"))
            half = low.b.shape[1] // 2
            rows = {"w1": slice(half), "w3": slice(half, None), "w2": slice(None)}[word]
            delta = low.delta(int(expert), rows)
        else:
            delta = adapter.read(module).delta()
        assert np.abs(delta).max() > 0.5
        np.testing.assert_allclose(base[key] + delta, want, atol=1e-6, rtol=0, err_msg=key)


@pytest.mark.parametrize("case", ["llama_qkgate", "llama_rslora_rankpattern"])
def test_ranks_and_scales_are_those_of_peft(case):
    """By names and arithmetic alone: Llama is no family of ours."""
    config = read_config(LORA / case)
    tensors = load_file(LORA / case / TENSORS)
    base = load_file(LORA / case / "base_model.safetensors")
    merged = load_file(LORA / case / "merged_changed_weights.safetensors")
    for key, want in merged.items():
        module = key.removesuffix(".weight")
        a, b = (tensors[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB")
        assert config.targeted(module) == module and config.rank_of(module) == a.shape[0]
        got = base[key] + LowRank(a, b, config.scale_of(module, a.shape[0])).delta()
        np.testing.assert_allclose(got, want, atol=1e-6, rtol=0, err_msg=key)
    untouched = {key.removesuffix(".weight") for key in base} - {
        k[: -len(".weight")] for k in merged
    }
    assert not [module for module in untouched if config.targeted(module)]


def test_written_again_it_is_what_peft_wrote(kimi, tmp_path):
    adapter = PeftFolder(LORA / "kimi_linear", kimi)
    shapes = {name: adapter.read(name) for name in adapter.maps()}
    shapes = {name: (low.rank, low.scale) for name, low in shapes.items()}
    report = write_peft(tmp_path / "out", kimi, shapes, adapter.read)
    ours, theirs = (load_file(f / TENSORS) for f in (tmp_path / "out", LORA / "kimi_linear"))
    assert ours.keys() == theirs.keys() and report.num_adapters == 31
    for key, value in theirs.items():
        assert ours[key].tobytes() == value.tobytes(), key
    want, got = (
        json.loads((folder / CONFIG).read_text())
        for folder in (LORA / "kimi_linear", tmp_path / "out")
    )
    assert got["target_modules"] == want["target_modules"]
    for key in got.keys() - {"target_modules", "target_parameters"}:
        assert got[key] == want[key], key


@pytest.mark.parametrize("spelling", ["transformers", "checkpoint"])
@pytest.mark.parametrize(
    "name", ["kimi_linear", "deepseek_v3", "deepseek_v32", "k3_text", "bailing_hybrid"]
)
def test_every_map_of_every_family_comes_back(name, spelling, tmp_path):
    """All maps at once, ranks and scales by kind of map, and each layer's its own numbers."""
    names = names_of(name)
    kinds = sorted({one.path for one in names.maps.values()})
    lows = {
        key: random_low(one, 1 + kinds.index(one.path) % 3, i, (1.0, 2.0, 0.5)[i % 3])
        for i, (key, one) in enumerate(names.maps.items())
    }
    shapes = {key: (low.rank, low.scale) for key, low in lows.items()}
    write_peft(tmp_path / "out", names, shapes, lows.__getitem__, spelling=spelling, rslora=True)
    back = PeftFolder(tmp_path / "out", names)
    assert back.maps() == list(lows)
    for key, low in lows.items():
        got = back.read(key)
        assert got.a.tobytes() == low.a.tobytes() and got.b.tobytes() == low.b.tobytes(), key
        assert math.isclose(got.scale, low.scale, rel_tol=1e-12), key


def test_half_of_a_model_is_targeted_and_no_more(tmp_path):
    """Targets by PEFT's own rules, over all modules there are: exactly the chosen ones."""
    for name in ("kimi_linear", "deepseek_v3", "k3_text", "bailing_hybrid"):
        names = names_of(name)
        rng = np.random.default_rng(0)
        chosen = {key for key in names.maps if rng.random() < 0.5}
        shapes = {key: (int(rng.integers(1, 4)), float(rng.integers(1, 4))) for key in chosen}
        lows = {key: random_low(names.maps[key], r, 0, s) for key, (r, s) in shapes.items()}
        out = tmp_path / name
        write_peft(out, names, shapes, lows.__getitem__)
        config = read_config(out)
        for key, one in names.maps.items():
            for want in names.wanted(one, memory=True):
                ends = config.parameters if want.parameter else config.modules
                hit = any(want.name == e or want.name.endswith("." + e) for e in ends)
                assert hit == (key in chosen), want
                if hit:
                    assert config.rank_of(want.name) == shapes[key][0]
                    got = config.scale_of(want.name, shapes[key][0])
                    assert math.isclose(got, shapes[key][1], rel_tol=1e-6)
        reached = [
            end for end in ("lm_head", "norm.weight", "embed_tokens") if end in config.modules
        ]
        assert not reached and "weight" not in config.parameters


SIZES = st.sampled_from([(5, 3), (3, 3), (2, 4), (4, 1)])  # experts, rank: E != r and E = r


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from([(5, 4), (9, 4), (8, 4), (3, 7)]), st.integers(0, 99))
def test_packing_against_a_merge_entry_by_entry(sizes, widths, seed):
    """Hidden H below, at and above 2 I: delta[e, o, i] = s sum_r B[o, r E + e] A[e R + r, i]."""
    (E, R), (H, inner) = sizes, widths
    rng = np.random.default_rng(seed)
    for width, out in ((H, 2 * inner), (inner, H)):
        low = LowRank(
            rng.standard_normal((E, R, width), np.float32),
            rng.standard_normal((E, out, R), np.float32), 1.5,
        )  # fmt: skip
        a, b = pack_experts(low)
        assert a.shape == (E * R, width) and b.shape == (out, R * E)
        for e in range(E):
            want = np.zeros((out, width))
            for r in range(R):
                want += 1.5 * np.outer(b[:, r * E + e].astype(float), a[e * R + r].astype(float))
            np.testing.assert_allclose(low.delta(e), want, atol=1e-5)
        back = unpack_experts(a, b, E, 1.5)
        assert np.array_equal(back.a, low.a) and np.array_equal(back.b, low.b)


@pytest.mark.parametrize("shared", [True, False])
def test_single_experts_with_gate_and_up_apart(shared):
    """Different A of gate and up, ranks, scales, and experts without: the change is the same."""
    rng = np.random.default_rng(1)

    def low(rank, scale, a=None):
        a = rng.standard_normal((rank, 6), np.float32) if a is None else a
        return LowRank(a, rng.standard_normal((4, rank), np.float32), scale)

    gates = [low(2, 0.5), None, low(3, 4.0), low(1, 1.0)]
    ups = [low(2, 2.0, gates[0].a if shared else None), low(2, 1.0), low(1, 3.0), None]
    whole = stack_experts([join_halves(g, u, 4) for g, u in zip(gates, ups, strict=True)])
    assert join_halves(gates[0], ups[0], 4).rank == (2 if shared else 4)
    for e, halves in enumerate(zip(gates, ups, strict=True)):
        want = np.concatenate([np.zeros((4, 6)) if x is None else x.delta() for x in halves])
        np.testing.assert_allclose(whole.delta(e), want, atol=1e-5)
    assert stack_experts([None, gates[0]]).delta(0).any() == np.False_


def test_padding_folding_and_trimming_keep_the_change():
    low = random_low(next(iter(names_of("kimi_linear").maps.values())), 3, 0)
    other = low.padded(7).scaled(0.25)
    assert other.rank == 7 and other.scale == 0.25
    np.testing.assert_allclose(other.delta(), low.delta(), rtol=1e-6)
    assert other.trimmed().rank == 3
    assert LowRank(low.a * 0, low.b * 0, 1.0).trimmed().rank == 0


def test_shortest_ends():
    ends = shortest_ends(["m.0.a.q", "m.1.a.q", "m.0.b.k", "m.0.b.w"], ["m.1.b.k", "w", "x.b.w"])
    assert ends == {"m.0.a.q": "q", "m.1.a.q": "q", "m.0.b.k": "0.b.k", "m.0.b.w": "0.b.w"}


def test_one_target_of_another_kind_is_named_in_full(tmp_path):
    write_config(
        tmp_path, {"layers.0.q": (4, 2.0, False), "layers.1.q": (8, 2.0, False)}, ["layers.2.q"],
        rslora=False, dropout=0.1, base="org/model",
    )  # fmt: skip
    raw = json.loads((tmp_path / CONFIG).read_text())
    assert raw["target_modules"] == ["0.q", "1.q"] and raw["lora_dropout"] == 0.1
    assert raw["r"] == 4 and raw["rank_pattern"] == {"1\\.q": 8}
    assert raw["lora_alpha"] == 8 and raw["alpha_pattern"] == {"1\\.q": 16}
    assert raw["base_model_name_or_path"] == "org/model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported: only LORA is"),
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=[5] is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"layers_to_transform": [1]}, "layers_to_transform=[1] is not supported: name"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported: it changes"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] is not supported"),
        ({"some_new_thing": 3}, "'some_new_thing'=3 is not known here"),
        ({"r": 0}, "r=0 must be a number above 0"),
        ({"r": 4}, "has rank 8, but adapter_config.json says 4"),
        ({"lora_alpha": "16"}, "lora_alpha='16' must be a number"),
        ({"use_rslora": 1}, "use_rslora=1 must be true or false"),
        ({"rank_pattern": {"(a+)+": 4}}, "none of them of a group"),
        ({"rank_pattern": {"(": 4}}, "must be a regular expression"),
        ({"target_modules": ["q_proj"]}, "is no target in adapter_config.json"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "is no target in adapter_config.json"),
    ],
)
def test_configs_that_are_not_read(kimi, copy, change, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        PeftFolder(copy(change), kimi)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
NO_MAP = "is no linear map of this kimi_linear model (names are like model.layers.0."


def beside(old: str, new: str):
    """Puts the adapter of one map under another name as well."""
    return lambda t: t | {key.replace(old, new): t[key] for key in map(Q.format, "AB")}


def respelled(t: dict) -> dict:
    return t | {k.replace("mlp.shared", "block_sparse_moe.shared"): v for k, v in t.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != Q.format("B")}, "q_proj' has no lora_B"),
        (
            lambda t: t | {Q.format("A"): t[Q.format("A")][:, 1:].copy()},
            "q_proj' has A [8, 31] and B [32, 8], but the map is [32, 32]",
        ),
        (lambda t: t | {Q.format("A"): np.zeros((8, 32), np.int32)}, "I32[8, 32] is no matrix"),
        (lambda t: t | {"x.lora_magnitude_vector": t[Q.format("A")]}, "only lora_A and lora_B of"),
        (beside("layers.0", "layers.9"), NO_MAP),
        (beside("q_proj", "o_norm"), NO_MAP),
        (respelled, "is there twice: 'model.layers.1.block_sparse_moe.shared_experts.gate_proj'"),
        (lambda t: {}, "has no adapter in it"),
    ],
)
def test_tensors_that_are_not_read(kimi, copy, change, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        PeftFolder(copy(tensors=change), kimi)


def test_a_pickle_is_not_opened(kimi, copy):
    folder = copy()
    (folder / TENSORS).rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model.bin is a pickle, which can run code"):
        PeftFolder(folder, kimi)
    with pytest.raises(CheckpointError, match=r"there is no such folder"):
        PeftFolder(folder / "none", kimi)


def test_nothing_half_written_stays(kimi, tmp_path):
    adapter = PeftFolder(LORA / "kimi_linear", kimi)

    def fail(name):
        raise CheckpointError("broken")

    with pytest.raises(CheckpointError, match="broken"):
        write_peft(tmp_path / "out", kimi, {adapter.maps()[0]: (8, 2.0)}, fail)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"--names=x is not one of transformers, checkpoint"):
        write_peft(tmp_path / "out", kimi, {adapter.maps()[0]: (8, 2.0)}, fail, spelling="x")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write_peft(tmp_path / "out", kimi, {adapter.maps()[0]: (8, 2.0)}, fail)
