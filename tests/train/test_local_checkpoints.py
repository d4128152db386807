"""Checkpoints on the hosts' own disks: a restart takes the newest whole one, whoever wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.checkpoint import CheckpointError, LocalCheckpoints
from moejax.config import CheckpointConfig, ConfigError
from moejax.train.loop import Loop
from tests.cli.conftest import SMALL
from tests.e2e.small import losses, rows, steps_on_disk, train

LAST = 6
SETTINGS = SMALL | {
    "train.num_steps": LAST, "checkpoint.every": 2, "eval.every": 0, "optim.schedule": "constant",
    "optim.warmup_fraction": 0.0, "mesh.fsdp": 8,
}  # fmt: skip


@pytest.fixture
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 4), ("data", "fsdp"))


@pytest.fixture
def tree(mesh) -> dict:
    """Leaves of several dtypes, sharded, replicated, and without dims."""

    def put(array, *spec):
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    return {
        "params": {
            "split": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), "fsdp", "data"),
            "whole": put(jnp.arange(6, dtype=jnp.float32)),
        },
        "step": put(jnp.int32(7)),
    }


def _abstract(tree: dict) -> dict:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def _local(tmp_path: Path, mesh, **changes) -> LocalCheckpoints:
    cfg = CheckpointConfig(local_every=1, local_dir=str(tmp_path / "own"))
    return LocalCheckpoints(cfg.replace(**changes), tmp_path / "run", mesh)


def test_what_is_read_is_what_was_saved(tmp_path, mesh, tree):
    local = _local(tmp_path, mesh)
    assert local.newest() is None
    for step in (1, 2, 3):
        local.save(step, tree, {"data": {"rows": 8 * step}})
    local.wait()
    assert [p.name for p in sorted(local.folder.iterdir())] == ["2.npz", "3.npz"]
    again = _local(tmp_path, mesh)  # another process in the same place
    assert again.newest() == 3
    state, position, step = again.restore(3, _abstract(tree))
    assert position == {"data": {"rows": 24}} and step == 3
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(tree), strict=True):
        assert got.dtype == want.dtype and got.sharding == want.sharding
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_step_that_is_not_whole_does_not_count(tmp_path, mesh, tree):
    local = _local(tmp_path, mesh)
    for step in (1, 2):
        local.save(step, tree, {})
    local.wait()
    newest = local.folder / "2.npz"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert local.newest() == 1
    newest.write_bytes(content[:100])
    assert local.newest() == 1
    local.clear()
    assert local.newest() is None


def test_another_mesh_or_another_run_finds_nothing(tmp_path, mesh, tree):
    local = _local(tmp_path, mesh)
    local.save(1, tree, {})
    local.wait()
    assert _local(tmp_path, jax.make_mesh((8,), ("fsdp",))).newest() is None
    shutil.rmtree(tmp_path / "run")
    assert _local(tmp_path, mesh).newest() is None


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, mesh, tree):
    (tmp_path / "own").write_text("a file")
    local = _local(tmp_path, mesh)
    local.save(1, tree, {})
    with pytest.raises(CheckpointError, match=r"local checkpoints cannot be written to .*own"):
        local.wait()
    with pytest.raises(ConfigError, match="go together"):
        CheckpointConfig(local_every=5)


class _Gone(Exception):
    """As if the process were killed."""


@pytest.mark.slow
def test_a_run_goes_on_from_the_newest_whole_one(tmp_path, monkeypatch):
    """Killed in step 6 with durable step 4 and local step 5: only step 6 is made again."""
    straight = tmp_path / "straight"
    train(straight, "tiny", SETTINGS, fast=True)
    own = {"checkpoint__local_every": 1, "checkpoint__local_dir": str(tmp_path / "own")}
    with monkeypatch.context() as patch:
        dispatch = Loop._dispatch

        def dying(self, step):
            if step == LAST:
                raise _Gone
            return dispatch(self, step)

        patch.setattr(Loop, "_dispatch", dying)
        with pytest.raises(_Gone):
            train(tmp_path / "run", "tiny", SETTINGS, fast=True, **own)
    assert steps_on_disk(tmp_path / "run") == [2, 4]
    out = train(tmp_path / "run", "tiny", SETTINGS, fast=True, **own).out
    assert "resuming from the hosts' own checkpoint of step 5" in out
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, LAST + 1))
    assert losses(tmp_path / "run") == losses(straight)
    assert rows(tmp_path / "run")[-1]["tokens"] == rows(straight)[-1]["tokens"]
