"""Adapters trained here load in PEFT, and PEFT's here: the extra `parity` (torch, peft).

No key missing, none unexpected, equal logits, on every family that transformers has a class for.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.merge import merge_lora
from moejax.checkpoint.peft_export import export_lora
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_write import write_peft
from moejax.config import MeshConfig
from moejax.generate.load import load
from moejax.train.import_lora import import_lora
from tests.models.published import FOLDER

pytestmark = pytest.mark.parity
FAMILIES = ("kimi_linear", "deepseek_v3", "deepseek_v32", "bailing_hybrid")
TOKENS = np.random.default_rng(7).integers(0, 100, (2, 47))


def names_of(name: str) -> PeftNames:
    source = HfSource(FOLDER / name)
    return PeftNames(source.parts, source.family.spelling, name)


def theirs(name: str):
    """The family's own model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits_of(model) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(TOKENS)).logits.float().numpy()


def loaded(name: str, folder):
    """PEFT's model of an adapter, with nothing missing and nothing unexpected."""
    peft = pytest.importorskip("peft")
    model = peft.PeftModel.from_pretrained(theirs(name), str(folder)).eval()
    found = peft.load_peft_weights(str(folder))
    report = peft.set_peft_model_state_dict(model, found)
    assert not report.unexpected_keys
    assert not [key for key in report.missing_keys if "lora_" in key]
    return model


@pytest.mark.parametrize("part", [1.0, 0.5])
@pytest.mark.parametrize("name", FAMILIES)
def test_ours_loads_in_peft(name, part, tmp_path):
    """Every map of a model, and half of them at random, ranks and scales mixed."""
    names, rng = names_of(name), np.random.default_rng(0)
    lows = {}
    for key, one in names.maps.items():
        if rng.random() < part and "indexer" not in key:
            rank, scale = int(rng.integers(1, 4)), float(rng.choice([0.5, 1.0]))
            lead = (one.num_experts,) if one.num_experts else ()
            a = rng.standard_normal((*lead, rank, one.in_size)).astype(np.float32)
            b = rng.standard_normal((*lead, one.out_size, rank)).astype(np.float32)
            lows[key] = LowRank(a * one.in_size**-0.5, b * 0.2, scale)
    shapes = {key: (low.rank, low.scale) for key, low in lows.items()}
    write_peft(tmp_path / "file", names, shapes, lows.__getitem__)
    import_lora(tmp_path / "file", FOLDER / name, tmp_path / "run")
    export_lora(tmp_path / "run", tmp_path / "out")
    model = loaded(name, tmp_path / "out")
    want = logits_of(model)
    got = np.asarray(load(tmp_path / "run", mesh=MeshConfig()).logits(TOKENS))
    base = logits_of(theirs(name))
    assert np.abs(want - base).max() > 0.05
    assert np.abs(got - want).max() <= 2e-4
    merged = merge_lora(tmp_path / "merged", run=tmp_path / "run")
    assert merged.num_adapters == len(lows)
    after = np.asarray(load(tmp_path / "merged", mesh=MeshConfig()).logits(TOKENS))
    assert np.abs(after - want).max() <= 2e-4


def configs(name: str) -> list[dict]:
    """What PEFT makes adapters of: by modules, and the experts by parameters."""
    kimi = name == "kimi_linear"
    modules = ["q_proj", "k_proj", "f_b_proj", "kv_b_proj"] if kimi else ["q_a_proj", "kv_b_proj"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return [
        {"r": 3, "lora_alpha": 6, "target_modules": modules, "target_parameters": experts},
        {"r": 8, "lora_alpha": 4, "target_modules": modules, "use_rslora": True,
         "rank_pattern": {"kv_b_proj": 2}, "alpha_pattern": {r"layers\.\d\.self_attn.*": 9}},
        {"r": 8, "lora_alpha": 8, "target_modules": [], "target_parameters":
         [*experts[:1], "mlp.gate.weight"]},
    ]  # fmt: skip


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v3"])
def test_theirs_loads_here(name, which, tmp_path):
    """E = 8 experts under rank 3 and 8; the file that comes out again is theirs, value by value."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    torch.manual_seed(which)
    model = peft.get_peft_model(theirs(name), peft.LoraConfig(**configs(name)[which]))
    for key, value in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(value, std=0.1)
    model.eval().save_pretrained(str(tmp_path / "theirs"))
    want = logits_of(model)
    import_lora(tmp_path / "theirs", FOLDER / name, tmp_path / "run")
    got = np.asarray(load(tmp_path / "run", mesh=MeshConfig()).logits(TOKENS))
    assert np.abs(got - want).max() <= 2e-4
    assert np.abs(want - logits_of(theirs(name))).max() > 0.01
    export_lora(tmp_path / "run", tmp_path / "ours")
    before, after = (
        load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("theirs", "ours")
    )
    assert before.keys() == after.keys()
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    for key, value in before.items():
        assert after[key].shape == value.shape, key
        if not config["rank_pattern"]:
            assert after[key].tobytes() == value.tobytes(), key
    assert np.abs(logits_of(loaded(name, tmp_path / "ours")) - want).max() <= 1e-5
