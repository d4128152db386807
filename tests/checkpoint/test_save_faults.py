"""Places that stop taking files while a run saves: one line, and the checkpoints before stay."""

from __future__ import annotations

import contextlib
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from moejax.checkpoint import CheckpointError, Checkpoints
from moejax.config import CheckpointConfig


def _state() -> dict:
    return {
        "params": {"w": jax.random.normal(jax.random.key(0), (300, 300))},
        "step": jnp.int32(1),
    }


def _save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, _state(), position={}, config={})
    checkpoints.wait()


@contextlib.contextmanager
def _full_disk(bytes_left: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_line_and_the_step_before_is_whole(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    _save(checkpoints, 1)
    with _full_disk(40_000), pytest.raises(CheckpointError, match="cannot be written") as raised:
        _save(checkpoints, 2)
    assert "\n" not in str(raised.value)
    checkpoints.close()
    again = Checkpoints(tmp_path, CheckpointConfig())
    assert again.all_steps() == [1]
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), _state())
    assert again.restore(None, abstract).step == 1
    _save(again, 2)  # there is room again: what the failed save left is no hindrance
    assert again.all_steps() == [1, 2]
    again.close()
    assert not list((tmp_path / "checkpoints").glob("*tmp*"))


def test_a_folder_deleted_meanwhile_is_made_anew(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    _save(checkpoints, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    _save(checkpoints, 2)
    _save(checkpoints, 3)
    assert checkpoints.all_steps() == [2, 3]
    checkpoints.close()
