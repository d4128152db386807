"""Experts that stay in MXFP4: bytes in and out, and what the model then computes."""

import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moejax
from moejax.checkpoint import CheckpointError, Checkpoints, HfFolder, read_config
from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_import import import_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.streamed import read_carried
from moejax.checkpoint.weights import open_weights
from moejax.config import ConfigError, MeshConfig, TrainConfig
from moejax.partitioning import make_mesh
from moejax.train.trainable import stored_params
from tests.models.published import FOLDER, cases
from tests.models.running import FAST_COMPILE

NAME = "k3_mxfp4"
CODES = ("gate_up", "gate_up_scales", "down", "down_scales")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("packed") / "in"
    import_hf(FOLDER / NAME, workdir, experts="packed")
    return workdir


@pytest.fixture(scope="module")
def source():
    return HfSource(FOLDER / NAME, packed=True)


def test_export_gives_every_byte_back(packed, tmp_path):
    export_hf(packed, tmp_path / "out", max_shard_bytes=150_000)
    before, after = HfFolder(FOLDER / NAME), HfFolder(tmp_path / "out")
    assert after.keys() == before.keys() and after.config == before.config
    for key in before.keys():
        assert bytes(after.raw(key)) == bytes(before.raw(key)), key
    config = json.loads((packed / "config.json").read_text())
    assert config["model"]["moe"]["expert_format"] == "mxfp4"
    # Scales are in the tree, not carried beside it.
    carried = read_carried(packed / "checkpoints" / "0")
    assert not any(name.endswith("_scale") for name in carried.tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_of_unpacked_experts(packed, dtype, tmp_path):
    export_hf(packed, tmp_path / "out", experts=dtype)
    before, after = HfSource(FOLDER / NAME), HfSource(tmp_path / "out")
    assert "quantization_config" not in after.raw_config["text_config"]
    for name, tensor in after.tensors.items():
        if ".experts." in name:
            assert (tensor.kind, tensor.dtype) == ("plain", {"float32": "F32"}.get(dtype, "BF16"))
        assert after.read(name).tobytes() == before.read(name).tobytes()


def test_leaves_are_the_stored_bytes(packed, source):
    assert read_config(packed / "checkpoints" / "0")["model"]["moe"]["expert_format"] == "mxfp4"
    read = Checkpoints.restore_parts(packed, {"params": source.parts.params})
    leaves = named_leaves(read["params"])
    experts = {name for name, leaf in leaves.items() if leaf.dtype == np.uint8}
    assert {name.rpartition("/")[2] for name in experts} == set(CODES)
    assert all("/experts/" in name for name in experts)
    moe = source.cfg.moe
    E, latent, inner = moe.num_experts, moe.latent_dim, moe.expert_dim
    stack = next(iter(experts)).rpartition("/")[0]
    assert leaves[f"{stack}/gate_up"].shape[2:] == (E, latent // 2, 2, inner)
    assert leaves[f"{stack}/down_scales"].shape[2:] == (E, inner // 32, latent)
    folder = HfFolder(FOLDER / NAME)
    key = "language_model.model.layers.2.block_sparse_moe.experts.1.{}"
    (leaf, at), *_ = source.map.entries[key.format("w3.weight_packed")].places
    np.testing.assert_array_equal(
        np.asarray(leaves[leaf])[at], folder.read(key.format("w3.weight_packed")).T
    )
    (leaf, at), *_ = source.map.entries[key.format("w2.weight_scale")].places
    np.testing.assert_array_equal(
        np.asarray(leaves[leaf])[at], folder.read(key.format("w2.weight_scale")).T
    )


def test_logits_and_loss_are_those_of_the_unpacked_weights(packed, tmp_path):
    import_hf(FOLDER / NAME, tmp_path / "plain")  # experts in bfloat16, the rest as stored
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2), jax.devices()[:4])
    want = cases(NAME)
    tokens, labels = (np.repeat(want[f"b_{name}"], 4, 0) for name in ("input_ids", "labels"))
    losses = {}
    for name, path in (("packed", packed), ("plain", tmp_path / "plain")):
        model = moejax.load(path, mesh=mesh)
        model.compiler_options = FAST_COMPILE
        assert model.config.moe.expert_format == ("mxfp4" if name == "packed" else "plain")
        if name == "packed":
            error = np.abs(model.logits(tokens) - want["b_logits"]).max()
            assert error <= 3e-4
        losses[name] = float(model.loss(tokens, labels))
    assert abs(losses["packed"] / losses["plain"] - 1) <= 1e-6
    assert abs(losses["packed"] / float(want["b_loss"]) - 1) <= 2e-5


def test_a_folder_is_read_packed_without_an_import(packed):
    """What a run starts from, into each device's share."""
    found, same = open_weights(FOLDER / NAME, packed=True), open_weights(packed)
    assert found.shapes == same.shapes and found.model.moe.expert_format == "mxfp4"
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(shape, np.uint8, sharding=here)
        for name, shape in found.shapes.items()
        if name.endswith(CODES) and "/experts/" in name
    }
    for name, leaf in found.read(wanted).items():
        np.testing.assert_array_equal(leaf, same.read({name: wanted[name]})[name])


def test_other_experts_are_not_packed(packed, tmp_path):
    with pytest.raises(CheckpointError, match="k3_text: no tensor is MXFP4"):
        import_hf(FOLDER / "k3_text", tmp_path / "out", experts="packed")
    with pytest.raises(CheckpointError, match="--experts=mxfp4 is not one of unpacked, packed"):
        import_hf(FOLDER / NAME, tmp_path / "out", experts="mxfp4")
    assert not any(tmp_path.iterdir())
    export_hf(packed, tmp_path / "half", experts="bfloat16")
    tensors = load_file(next((tmp_path / "half").glob("*.safetensors")))
    key = "language_model.model.layers.2.block_sparse_moe.experts.0.w1.weight"
    codes = HfFolder(FOLDER / NAME)
    for name in codes.keys():
        if ".experts." in name and key not in name:
            tensors[name] = codes.read(name)
            tensors.pop(re.sub("_(packed|scale)$", "", name), None)
    save_file(tensors, tmp_path / "half" / "model.safetensors")
    with pytest.raises(CheckpointError, match=re.escape(f"{key}: experts of type BF16 are not")):
        import_hf(tmp_path / "half", tmp_path / "out", experts="packed")


def test_packed_experts_are_not_trained(source):
    infos = source.parts.infos
    every, none = (jax.tree.map(lambda _, m=m: m, infos) for m in (True, False))
    stored = stored_params(TrainConfig(frozen_dtype="bfloat16"), source.parts.params, infos, none)
    kinds = {np.dtype(leaf.dtype) for leaf in jax.tree.leaves(stored)}
    assert kinds == {np.dtype(t) for t in (np.uint8, np.float32, ml_dtypes.bfloat16)}
    with pytest.raises(ConfigError, match=r"experts\.\w+ packed, which cannot be trained"):
        stored_params(TrainConfig(), source.parts.params, infos, every)


def test_blocks_must_divide_the_experts(source):
    with pytest.raises(ConfigError, match="multiples of 32"):
        source.cfg.replace(moe=source.cfg.moe.replace(expert_dim=48))
