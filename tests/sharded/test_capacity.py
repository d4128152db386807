"""A capacity drops the same tokens on every mesh, and says how many."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.moe.latent_moe import LatentMoe
from tests.sharded.meshes import (
    DATA2_EXPERT4,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    mesh_of,
    named,
    relative_error,
)

B, T, D, E, A = 8, 32, 16, 8, 2
CAPACITY = 0.75
SHAPE = {"num_experts": E, "top_k": A, "expert_dim": 8, "latent_dim": 8, "num_shared": 0}


def layer(rngs: nnx.Rngs, **moe) -> LatentMoe:
    # A large init, so that the routing is lopsided.
    return LatentMoe(D, MoeConfig(**SHAPE, **moe), FfnConfig(), 1e-5, 0.5, rngs)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    x_BTD = rng.standard_normal((B, T, D)).astype(np.float32)
    x_BTD += rng.standard_normal((B, 1, D)).astype(np.float32)
    segment_ids_BT = np.ones((B, T), np.int32)
    segment_ids_BT[:, -3:] = 0
    return x_BTD, segment_ids_BT


@functools.cache
def result(mesh_items: tuple, capacity_factor: float = CAPACITY):
    """Output, auxiliary values and the router's choices of one mesh."""

    def run(x_BTD, segment_ids_BT):
        moe = layer(nnx.Rngs(params=3), capacity_factor=capacity_factor)
        out, aux = moe(x_BTD, segment_ids_BT)
        return out, aux, moe.router(x_BTD)[0]

    with jax.set_mesh(mesh_of(dict(mesh_items))):
        jitted = jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
        return jax.tree.map(np.asarray, jitted(*map(jnp.asarray, inputs())))


def dropped_by_hand(ids_BTA: np.ndarray) -> tuple[int, np.ndarray]:
    """How many choices are dropped, and which tokens lose all of theirs."""
    capacity = math.ceil(CAPACITY * T * A / E)
    dropped, kept_BT = 0, np.zeros((B, T), int)
    for b in range(B):
        taken = np.zeros(E, int)
        for t, a in np.ndindex(T, A):
            if inputs()[1][b, t] == 0:
                continue
            taken[ids_BTA[b, t, a]] += 1
            full = taken[ids_BTA[b, t, a]] > capacity
            dropped += full
            kept_BT[b, t] += not full
    return dropped, kept_BT == 0


@pytest.mark.parametrize("sizes", [ONE, FSDP8, EXPERT8, FSDP2_EXPERT4, DATA2_EXPERT4], ids=named)
def test_drops_are_counted_and_do_not_depend_on_the_mesh(sizes):
    out, aux, ids_BTA = result(tuple(sizes.items()))
    dropped, without_BT = dropped_by_hand(ids_BTA)
    assert dropped > B * T * A / 10 and aux["dropped"] == dropped
    # A token without any expert has a routed part of exactly 0, every other one has not.
    assert np.array_equal(np.all(out == 0, -1), without_BT)
    want, want_aux, want_ids = result(tuple(ONE.items()))
    np.testing.assert_array_equal(ids_BTA, want_ids)
    np.testing.assert_array_equal(aux["load"], want_aux["load"])
    assert relative_error(out, want) <= 1e-5


def test_without_a_capacity_nothing_is_dropped():
    out, aux, _ = result(tuple(FSDP2_EXPERT4.items()), 0.0)
    assert aux["dropped"] == 0
    padding_BT = inputs()[1] == 0
    assert np.array_equal(np.all(out == 0, -1), padding_BT)
