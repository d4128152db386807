"""Published formats in and out: every tensor, every byte; and what is wrong is named."""

import dataclasses
import json
import math
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax.checkpoint import CheckpointError, Checkpoints, HfFolder
from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_import import import_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.key_map import KeyMap
from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.weights import open_weights
from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.models.hf_config import FAMILIES, read_hf_config
from moejax.models.hf_config_write import first_difference, write_hf_config
from moejax.models.parts import model_parts
from tests.models.published import FOLDER

FOLDERS = (
    "k3_text", "k3_multimodal", "k3_mxfp4", "kimi_linear", "deepseek_v3", "deepseek_v32",
    "deepseek_v32_fp8", "bailing_hybrid", "kimi_k25",
)  # fmt: skip
SHIPPED = ("tiny", "small", "kimi_k31", "kimi_k31_vision", "kimi_linear_48b", "deepseek_v32")


@pytest.mark.parametrize("name", FOLDERS)
def test_export_of_import_is_bit_equal(name, tmp_path):
    report = import_hf(FOLDER / name, tmp_path / "in")
    export_hf(tmp_path / "in", tmp_path / "out", max_shard_bytes=150_000)
    before, after = HfFolder(FOLDER / name), HfFolder(tmp_path / "out")
    assert after.keys() == before.keys() and after.config == before.config
    assert len(after.files) > 1
    for key in before.keys():
        assert bytes(after.raw(key)) == bytes(before.raw(key)), key
    assert report.num_carried == 0


def test_a_vision_tower_can_be_carried_along(tmp_path):
    folder = FOLDER / "k3_multimodal"
    report = import_hf(folder, tmp_path / "in", allow=("vision_tower.",))
    assert report.num_carried == 24
    export_hf(tmp_path / "in", tmp_path / "out")
    before, after = HfFolder(folder), HfFolder(tmp_path / "out")
    assert after.keys() == before.keys() and after.config == before.config
    assert all(bytes(after.raw(key)) == bytes(before.raw(key)) for key in before.keys())


@pytest.mark.parametrize(
    "key, value",
    [
        ("mm_projector_type", "resampler"),
        ("merge_kernel_size", [1, 1]),
        ("pos_emb_interpolation_mode", "nearest"),
        ("norm_type", "batchnorm"),
        ("qkv_hidden_size", 30),
        ("text_hidden_size", 64),
        ("attn_bias", True),
        ("vt_num_hidden_layers", None),
        ("window_size", 8),
        ("rope_parameters", [1]),
        ("projector_ln_eps", "small"),
    ],
)
def test_a_tower_that_is_not_ours_is_refused_by_its_key(key, value):
    raw = json.loads((FOLDER / "k3_multimodal" / "config.json").read_text())
    raw["vision_config"][key] = value
    with pytest.raises(ConfigError, match=key):
        read_hf_config(raw)
    assert not read_hf_config(raw, vision=False)[1].vision.num_layers


def test_a_text_model_starts_from_a_folder_with_a_tower(tmp_path):
    folder = FOLDER / "k3_multimodal"
    weights = open_weights(folder, vision=False)
    assert not any(name.startswith("params/vision/") for name in weights.shapes)
    weights.keep_for_export(tmp_path)
    kept = load_file(tmp_path / "hf" / "carried.safetensors")
    assert len([name for name in kept if name.startswith(("vision_", "mm_"))]) == 24
    assert "params/vision/grid" in open_weights(folder).shapes


def test_parts_that_are_not_computed_are_carried(tmp_path):
    """An MTP layer, and the depth query of layer 0 that no layer reads."""
    folder = tmp_path / "src"
    shutil.copytree(FOLDER / "k3_text", folder, ignore=shutil.ignore_patterns("grads*", "cases*"))
    tensors = load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(raw))
    mtp = "language_model.model.layers.6."
    rng = np.random.default_rng(0)
    tensors[mtp + "eh_proj.weight"] = rng.standard_normal((32, 64)).astype(ml_dtypes.bfloat16)
    tensors[mtp + "enorm.weight"] = rng.standard_normal(32).astype(np.float32)
    tensors["language_model.model.layers.1.self_attn.A_log"][5:] = 3.5  # padding that is not zero
    query = "language_model.model.layers.0.self_attention_res_proj.weight"
    assert query in tensors and np.any(tensors[query])
    save_file(tensors, folder / "model.safetensors")
    import_hf(folder, tmp_path / "in")
    export_hf(tmp_path / "in", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert set(after) == set(tensors)
    for key, value in tensors.items():
        assert after[key].dtype == value.dtype and after[key].tobytes() == value.tobytes(), key
    del tensors[query]
    save_file(tensors, folder / "model.safetensors")
    report = import_hf(folder, tmp_path / "without")
    assert report.absent == [query]
    export_hf(tmp_path / "without", tmp_path / "without_out")
    assert set(load_file(tmp_path / "without_out" / "model.safetensors")) == set(tensors)


def test_leaves_hold_the_dequantised_weights(tmp_path):
    import_hf(FOLDER / "k3_mxfp4", tmp_path / "in")
    source = HfSource(FOLDER / "k3_mxfp4")
    want = load_file(FOLDER / "k3_mxfp4" / "dequantised_layer_2.safetensors")
    assert want
    for key, value in want.items():
        assert source.read(key).tobytes() == value.tobytes(), key
    leaves = named_leaves(
        Checkpoints.restore_parts(tmp_path / "in", {"params": source.parts.params})
    )
    for name in source.tensors:
        for leaf, index, array in source.pieces(name):
            if not leaf.endswith("router/bias"):
                got = np.asarray(leaves["params/" + leaf])[index]
                assert got.tobytes() == np.ascontiguousarray(array).tobytes(), name


def test_fp8_leaves_are_the_product_rounded_once(tmp_path):
    source = HfSource(FOLDER / "deepseek_v32_fp8")
    want = load_file(FOLDER / "deepseek_v32_fp8" / "dequantised_some.safetensors")
    for key, value in want.items():
        assert source.read(key).tobytes() == value.tobytes(), key
        half = source.read(key, ml_dtypes.bfloat16)
        assert half.tobytes() == value.astype(ml_dtypes.bfloat16).tobytes(), key


def test_weights_that_training_moved_are_requantised(tmp_path):
    """Scales are kept while they hold the values, and grow with those that outgrew them."""
    source = HfSource(FOLDER / "k3_mxfp4")
    name = "language_model.model.layers.2.block_sparse_moe.experts.0.w1.weight"
    key = name.removesuffix(".weight")
    values = source.read(name)
    from moejax.checkpoint import quant
    from moejax.checkpoint.hf_export import _with_scales

    scales = source.folder.read(key + ".weight_scale")
    same, kept = _with_scales("mxfp4", values, scales)
    np.testing.assert_array_equal(kept, scales)
    moved = values.copy()
    moved[3, 40] = 5 * np.abs(values[3, 32:64]).max()
    _, grown = _with_scales("mxfp4", moved, scales)
    assert (grown != scales).sum() == 1 and grown[3, 1] > scales[3, 1]
    back = quant.mxfp4_decode(*quant.mxfp4_encode(moved, grown))
    assert abs(back[3, 40] - moved[3, 40]) <= 0.25 * abs(moved[3, 40])


@pytest.mark.parametrize("experts", ["bfloat16", "mxfp4"])
def test_experts_are_exported_as_asked(experts, tmp_path):
    import_hf(FOLDER / "k3_mxfp4", tmp_path / "in")
    export_hf(tmp_path / "in", tmp_path / "out", experts=experts)
    after = HfSource(tmp_path / "out")
    before = HfSource(FOLDER / "k3_mxfp4")
    quantised = "quantization_config" in after.raw_config["text_config"]
    assert quantised == (experts == "mxfp4")
    for name, tensor in after.tensors.items():
        if ".experts." in name:
            assert tensor.kind == ("mxfp4" if experts == "mxfp4" else "plain")
            assert after.read(name).tobytes() == before.read(name).tobytes()


@pytest.mark.parametrize("name", SHIPPED)
def test_config_json_gives_the_model_back(name):
    cfg = load_config(name, {}).model
    raw = json.loads(json.dumps(write_hf_config(cfg)))
    family, again = read_hf_config(raw)
    assert not first_difference(cfg, again) and not first_difference(again, cfg)
    parts = model_parts(again)
    assert parts.params.keys() == model_parts(cfg).params.keys()
    assert family is FAMILIES[raw["model_type"]]


@pytest.mark.parametrize("name", ["kimi_linear", "deepseek_v3", "deepseek_v32"])
def test_both_spellings_of_a_config_are_one_model(name):
    models = []
    for file in ("config.json", "config_hub.json"):
        models.append(read_hf_config(json.loads((FOLDER / name / file).read_text()))[1])
    assert not first_difference(*models)


def test_every_key_of_kimi_k3_is_accounted_for():
    """497,220 keys: 69 KDA layers, 24 MLA layers, 92 x 896 experts in codes, vision, projector."""
    parts = model_parts(load_config("kimi_k3", {}).model)
    keys = KeyMap(parts, FAMILIES["kimi_k3"].spelling, num_mtp=1)
    names = list(keys.entries)
    routed = [name for name in names if ".experts." in name]
    assert len(routed) == 92 * 896 * 3
    vision = [f"vision_tower.encoder.blocks.{j}.wqkv.weight" for j in range(27)]
    assert all(keys.kind(name) == "carried" for name in [*vision, "mm_projector.proj.0.weight"])
    # Codes and scales make two keys of every routed map; 165 + 3 keys are not the language model's.
    assert len(names) + len(routed) + 168 == 497_220
    padding = 69 * (128 - 96)
    assert sum(math.prod(e.shape) for e in keys.entries.values()) - padding == 2_779_484_476_000
    first = keys.entries["language_model.model.layers.3.self_attn.q_b_proj.weight"]
    assert first.shape == (18432, 1536)
    assert keys.kind("language_model.model.layers.93.eh_proj.weight") == "carried"
    for layer in (92, 94):
        assert keys.kind(f"language_model.model.layers.{layer}.eh_proj.weight") == "unexpected"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_value_of_every_leaf_has_one_place(name):
    """Tensors of a model cover its leaves exactly: by count, and by disjoint places."""
    parts = model_parts(load_config(name, {}).model)
    spelling = FAMILIES[write_hf_config(parts.cfg)["model_type"]].spelling
    keys = KeyMap(parts, dataclasses.replace(spelling, a_log="n"))
    values = sum(math.prod(e.shape) for e in keys.entries.values())
    assert values == sum(math.prod(leaf.shape) for leaf in keys.leaves.values())
    places = [(leaf, str(index)) for e in keys.entries.values() for leaf, index in e.places]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    "name, key, tensor",
    [
        ("nemotron_h", "chunk_size", "backbone.embeddings.weight"),
        ("qwen3_next", "decoder_sparse_step", "model.layers.0.linear_attn.A_log"),
        ("glm5_next_text", "hc_eps", "model.language_model.embed_tokens.weight"),
        ("glm_moe_dsa", "indexer_types", None),
    ],
)
def test_other_families_are_refused_by_their_first_key(name, key, tensor, tmp_path):
    given = json.loads((FOLDER / "only_shapes" / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given["config"]))
    save_file(
        {k: np.zeros(s, np.int8) for k, s in given["shapes"].items()}, tmp_path / "m.safetensors"
    )
    with pytest.raises(CheckpointError, match=rf"key {key}=") as error:
        import_hf(tmp_path, tmp_path / "out")
    assert tensor is None or str(error.value).endswith(f"First tensor of it: {tensor}.")
    assert not (tmp_path / "out").exists()


def _change(tensors: dict, raw: dict, what: str) -> None:
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    if what == "missing":
        del tensors[key]
    elif what == "unexpected":
        tensors["model.layers.1.mlp.adapter.weight"] = np.zeros(3, np.float32)
    elif what == "shape":
        tensors[key] = tensors[key].T.copy()
    elif what == "config":
        raw["use_sliding_window"] = True
    elif what == "bias":
        raw["attention_bias"] = True
    elif what == "no family":
        raw["model_type"] = "llama"


@pytest.mark.parametrize(
    "what, message",
    [
        (
            "missing",
            r"key model\.layers\.1\.mlp\.experts\.2\.up_proj\.weight is missing from model",
        ),
        ("unexpected", r"model\.safetensors, key model\.layers\.1\.mlp\.adapter\.weight: no part"),
        ("shape", r"up_proj\.weight: shape \[32, 12\], but config\.json asks for \[12, 32\]"),
        ("config", r"key use_sliding_window=True is not supported"),
        ("bias", r"key attention_bias=True is not supported"),
        ("no family", r"key model_type='llama' is not supported"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_stays(what, message, tmp_path):
    src = tmp_path / "src"
    src.mkdir()
    tensors = load_file(FOLDER / "deepseek_v3" / "model.safetensors")
    raw = json.loads((FOLDER / "deepseek_v3" / "config.json").read_text())
    _change(tensors, raw, what)
    save_file(tensors, src / "model.safetensors")
    (src / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=message) as error:
        import_hf(src, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]
    if what == "unexpected":
        report = import_hf(src, tmp_path / "out", allow=["model.layers.1.mlp.adapter"])
        assert report.num_carried == 1


def test_a_shard_that_ends_early_leaves_nothing(tmp_path):
    src = tmp_path / "src"
    shutil.copytree(FOLDER / "deepseek_v3", src)
    (src / "grads.safetensors").unlink()
    data = (src / "model.safetensors").read_bytes()
    (src / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        import_hf(src, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["src"]


def test_other_packings_are_refused(tmp_path):
    for name, change, message in (
        ("k3_mxfp4", "int4", r"weight_packed: I32 codes with U8 scales are not MXFP4"),
        ("k3_mxfp4", "no scale", r"its scales .*weight_scale are missing"),
        ("deepseek_v32_fp8", "blocks", r"weight_block_size=\[64, 64\] is not supported"),
    ):
        src = tmp_path / change
        src.mkdir()
        raw = json.loads((FOLDER / name / "config.json").read_text())
        if change == "blocks":
            raw["quantization_config"]["weight_block_size"] = [64, 64]
            shutil.copyfile(FOLDER / name / "model.safetensors", src / "model.safetensors")
        else:
            tensors = load_file(FOLDER / name / "model.safetensors")
            key = next(key for key in tensors if key.endswith(".weight_packed"))
            if change == "int4":
                tensors[key] = tensors[key].view(np.int32)
            else:
                del tensors[key.removesuffix("_packed") + "_scale"]
            save_file(tensors, src / "model.safetensors")
        (src / "config.json").write_text(json.dumps(raw))
        with pytest.raises(CheckpointError, match=message):
            HfSource(src)


def source_of(tmp_path, change):
    """deepseek_v3 with its config changed."""
    raw = json.loads((FOLDER / "deepseek_v3" / "config.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    shutil.copyfile(FOLDER / "deepseek_v3" / "model.safetensors", tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_nextn_predict_layers": 0, "num_hidden_layers": 3}, r"model\.layers\.3\..*: no part"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is not allowed"),
        ({"first_k_dense_replace": 10**30}, "first_k_dense_replace=1000000"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers='4' is not allowed: .* whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not allowed"),
        ({"hidden_size": True}, "hidden_size=True is not allowed"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' is not allowed: it must be a number"),
        ({"rope_parameters": [1]}, "rope_parameters=.*must be an object"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_parameters.rope_theta=.*a number"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob='false' .* true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act=.*a word"),
        ({"layer_types": 3}, "layer_types=3 .* list of words"),
        ({"routed_scaling_factor": None}, "key routed_scaling_factor is missing"),
        ({"num_experts_per_tok": None}, "num_experts_per_token or num_experts_per_tok is missing"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 3.0}},
            r"key rope_parameters\.attention_factor=3\.0 is not supported",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "of type yarn has no factor"),
    ],
)
def test_config_keys_of_the_wrong_kind_are_one_line(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message) as error:
        HfSource(source_of(tmp_path, lambda raw: raw.update(changes)))
    assert "\n" not in str(error.value)


def test_yarn_without_a_length_starts_at_the_models(tmp_path):
    yarn = {"rope_parameters": {"rope_type": "yarn", "factor": 4}}
    cfg = HfSource(source_of(tmp_path, lambda raw: raw.update(yarn))).cfg
    assert (cfg.mla.yarn_factor, cfg.mla.yarn_original_length) == (4.0, 256)


@pytest.mark.parametrize("dtype", [np.float64, np.int32])
def test_weights_of_other_types_are_refused(dtype, tmp_path):
    source_of(tmp_path, lambda raw: None)
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[key] = tensors[key].astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{re.escape(key)}: weights of type [FI]"):
        HfSource(tmp_path)


def test_what_a_killed_import_left_goes_with_the_next(tmp_path):
    dead, alive = tmp_path / "out.partial-999999999", tmp_path / f"out.partial-{os.getppid()}"
    dead.mkdir()
    alive.mkdir()
    import_hf(FOLDER / "deepseek_v3", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", alive.name]
    cfg = load_config(tmp_path / "out", {})
    assert not first_difference(cfg.model, HfSource(FOLDER / "deepseek_v3").cfg)
