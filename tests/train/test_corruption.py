"""Silent corruption: one flipped bit is found, and nothing where there is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.train.corruption import CorruptionError, StateCheck, bit_sums, unlike_results
from moejax.train.evaluate import put_batch
from moejax.train.loop import Loop
from moejax.train.state import build_program, init_state
from tests.cli.conftest import SMALL
from tests.e2e.small import losses, train

SHARED = SMALL | {"mesh.data": 2, "mesh.fsdp": 4, "train.check_every": 2}


@pytest.fixture(scope="module")
def checked():
    """A check, compiled, with the state and the batch that it found nothing in."""
    cfg = load_config("tiny", SHARED)
    program = build_program(cfg, make_mesh(cfg.mesh))
    state, check = init_state(program, 0), StateCheck(program)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "segment_ids": np.ones_like(tokens)}
    batch = put_batch(program, batch, 1)
    check(2, state, batch)
    return program, check, state, batch


def _flipped(leaf: jax.Array, device: int, bit: int) -> jax.Array:
    """The array with one bit of one device's copy another."""
    parts = []
    for shard in leaf.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.reshape(-1).view(np.uint32)[-1] ^= np.uint32(1 << bit)
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_a_flipped_bit_of_a_copy_is_found(checked, bit):
    _, check, state, batch = checked
    leaves, tree = jax.tree.flatten(state)
    norm = next(n for n, leaf in enumerate(leaves) if leaf.ndim and leaf.is_fully_replicated)
    leaves[norm] = _flipped(leaves[norm], 5, bit)
    with pytest.raises(CorruptionError, match=r"is not the same on device 5 of process 0\. Take"):
        check(2, jax.tree.unflatten(tree, leaves), batch)


def test_of_two_copies_both_are_named(checked):
    """Split over fsdp and repeated over data, a part has two holders."""
    _, check, state, batch = checked
    leaves, tree = jax.tree.flatten(state)
    part = next(n for n, leaf in enumerate(leaves) if not leaf.is_fully_replicated)
    leaves[part] = _flipped(leaves[part], 6, 3)
    with pytest.raises(CorruptionError, match=r"not the same on device 2 .*, device 6 of"):
        check(2, jax.tree.unflatten(tree, leaves), batch)


def test_a_device_that_computes_otherwise_is_named(checked):
    program, check, state, batch = checked
    with jax.set_mesh(program.mesh):
        once = jax.device_get(check._of_gradients(state, batch))
    assert unlike_results(program.mesh, once, once) == []
    name, again = next(iter(once)), {key: np.array(value) for key, value in once.items()}
    again[name][3] += 1
    (line,) = unlike_results(program.mesh, once, again)
    assert line == f"the gradient of {name} came out otherwise on device 3 of process 0"


def test_sums_see_every_bit_and_every_place():
    mesh, spec = jax.make_mesh((8,), ("x",)), jax.P()
    base = np.zeros(40, np.float32)
    seen = {0}
    for place in (0, 1, 39):
        for bit in (0, 15, 31):
            other = base.copy()
            other.view(np.uint32)[place] = 1 << bit
            sums = bit_sums(mesh, {"a": jnp.asarray(other)}, {"a": spec})["a"]
            (one,) = set(np.asarray(sums).tolist())
            seen.add(one)
    assert len(seen) >= 8  # 2^31 times any odd number is 2^31


@pytest.mark.slow
def test_a_run_that_is_checked_is_the_run_that_is_not(tmp_path, monkeypatch):
    train(tmp_path / "plain", "tiny", SHARED | {"train.check_every": 0}, fast=True)
    train(tmp_path / "checked", "tiny", SHARED, fast=True)
    assert losses(tmp_path / "plain") == losses(tmp_path / "checked")

    def spoil(self, *args, real=Loop._milestone, **kwargs):
        leaves, tree = jax.tree.flatten(self.state)
        norm = next(n for n, leaf in enumerate(leaves) if leaf.ndim and leaf.is_fully_replicated)
        leaves[norm] = _flipped(leaves[norm], 1, 0)
        self.state = jax.tree.unflatten(tree, leaves)
        real(self, *args, **kwargs)

    monkeypatch.setattr(Loop, "_milestone", spoil)
    with pytest.raises(CorruptionError, match="silent corruption at step 2"):
        train(tmp_path / "spoilt", "tiny", SHARED, fast=True)
    assert not (tmp_path / "spoilt" / "checkpoints").exists()
