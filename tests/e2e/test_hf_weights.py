"""Trained weights go out in a published format and start another run, longer rows included."""

import json

import numpy as np
import pytest

from moejax.checkpoint import CheckpointError, Checkpoints
from moejax.checkpoint.hf_export import export_hf
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import named_leaves
from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.models.parts import model_parts
from moejax.partitioning import make_mesh
from moejax.train.initial import start_from_weights
from moejax.train.state import build_program
from tests.e2e.small import SMALL, losses, train

# The published format has no rank of the decay of its own.
K3_SHAPED = SMALL | {"model.kda.decay_rank": 16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("hf") / "run"
    train(workdir, settings=K3_SHAPED, fast=True, train__stop_at=6)
    return workdir


@pytest.fixture(scope="module")
def exported(trained):
    export_hf(trained, trained.parent / "export", dtype="float32")
    return trained.parent / "export"


def test_exported_tensors_are_the_trained_weights(trained, exported):
    source = HfSource(exported)
    assert source.raw_config["text_config"]["dsa_config"]["layers"] == [2]
    params = Checkpoints.restore_weights(trained, source.parts.params)
    for name, leaf in named_leaves(params).items():
        whole = tuple(slice(0, n) for n in leaf.shape)
        got = source.read_leaf(name, whole, np.float32)
        assert got.tobytes() == np.asarray(leaf).tobytes(), name


def test_bfloat16_keeps_the_float32_list(trained, tmp_path):
    export_hf(trained, tmp_path / "half")
    for name, tensor in HfSource(tmp_path / "half").tensors.items():
        wide = name.endswith(("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "_bias"))
        assert tensor.dtype == ("F32" if wide else "BF16"), name


def test_a_run_starts_from_the_folder_with_longer_rows(trained, exported, tmp_path):
    done = train(
        tmp_path / "work", settings=K3_SHAPED, fast=True, init_from=str(exported),
        train__stop_at=1, data__seq_len=128, data__batch_size=8,
    )  # fmt: skip
    assert f"starting from the weights of {exported}" in done.out
    assert "taken   stack0.run0.attn: a_log beta" in done.out
    assert losses(tmp_path / "work", 1, 1)[0] < losses(trained, 1, 1)[0] - 0.5
    # What came in a published format can go out in it again.
    assert json.loads((tmp_path / "work/hf/config.json").read_text())["model_type"] == "kimi_k3"
    export_hf(tmp_path / "work", tmp_path / "again")
    kinds = {n: t.dtype for n, t in HfSource(tmp_path / "again").tensors.items()}
    assert set(kinds.values()) == {"F32"}  # as in the folder it started from


def begin(settings: dict, said: list[str]):
    cfg = load_config("base", settings)
    return start_from_weights(build_program(cfg, make_mesh(cfg.mesh)), said.append)[0]


def test_only_what_is_named_may_differ(exported):
    """An indexer that starts fresh, and experts of another width."""
    plain = K3_SHAPED | {"init_from": str(exported), "model.attention": "kda,mla"}
    with pytest.raises(ConfigError, match=r"5 parameters of it are not in this model: .*indexer"):
        begin(plain, [])
    said: list[str] = []
    begin(plain | {"init_allow": ("*.indexer.*",)}, said)
    assert sum(line.startswith("  not taken") for line in said) == 5
    wider = K3_SHAPED | {"init_from": str(exported), "model.moe.expert_dim": 32}
    with pytest.raises(ConfigError, match=r"have another shape \(stack0\.run0\.ffn\.experts\.down"):
        begin(wider, [])
    said = []
    state = begin(wider | {"init_allow": ("*.experts.*", "*.shared.*")}, said)
    assert "  fresh   stack0.run0.ffn.experts.gate_up" in said
    source = HfSource(exported)
    q = named_leaves(state.params)["stack0/run0/attn/q"]
    whole = tuple(slice(0, n) for n in q.shape)
    assert (
        source.read_leaf("stack0/run0/attn/q", whole, np.float32).tobytes()
        == np.asarray(q).tobytes()
    )
    gate_up = named_leaves(state.params)["stack0/run0/ffn/experts/gate_up"]
    assert gate_up.shape[-1] == 32 and float(np.abs(np.asarray(gate_up)).max()) > 0


def test_a_model_that_the_format_cannot_hold_is_refused(tmp_path):
    parts = model_parts(load_config("base", SMALL).model)
    from moejax.models.hf_config_write import write_hf_config

    with pytest.raises(ConfigError, match=r"model\.kda\.decay_rank=8 cannot be written"):
        write_hf_config(parts.cfg)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        export_hf(tmp_path, tmp_path / "out")
