"""A training step is the same on any mesh, in microbatches, under any remat and exchange.

Measure: a leaf's largest difference over its own largest magnitude, without any floor.
"""

import jax
import numpy as np
import pytest

from tests.sharded.meshes import (
    DATA2_EXPERT4,
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    assert_leaves_agree,
    named,
    relative_error,
)
from tests.sharded.stepping import MODEL, UPDATES, Steps, start, steps, steps_in_two

TOLERANCE = 1e-5
EIGHT = [FSDP8, EXPERT8, FSDP2_EXPERT4, DATA2_FSDP2_EXPERT2]
SPLIT = [(n, policy) for policy in ("none", "full", "exchange") for n in (1, 2, 4)]

# Receive buffers below an even share, so that every layer takes further rounds.
RAGGED = {"exchange": "ragged", "receive_factor": 0.75}
BY_DEVICE = RAGGED | {"exchange_level": "device", "exchange_slices": 2}
BY_HOST = RAGGED | {"exchange_level": "host"}
SLICED = {"exchange": "padded", "exchange_slices": 4}
# Mesh, microbatches, rematerialisation, exchange: every setting meets a mesh and a policy that it
# could disagree with; the layer's own matrix has the pairs, the slow tier the product.
WHOLE = [
    (FSDP8, 1, "none", {}),
    (ONE, 4, "full", {}),
    (DATA2_FSDP2_EXPERT2, 2, "none", {}),
    (FSDP2_EXPERT4, 1, "exchange", SLICED),
    (EXPERT8, 4, "full", RAGGED | {"exchange_slices": 4}),
    (FSDP2_EXPERT4, 2, "full", BY_DEVICE),
    (EXPERT8, 1, "exchange", BY_HOST | {"exchange_hosts": 2}),
    (DATA2_EXPERT4, 4, "none", BY_HOST | {"exchange_hosts": 4, "exchange_slices": 2}),
]


def assert_same_training(got: Steps, want: Steps) -> None:
    """Loss, norm, routing, balancing and every gradient of each step; the last parameters."""
    for i in range(UPDATES):
        for name in ("loss", "grad_norm", "indexer_kl", "lr"):
            error = relative_error(got.metrics[i][name], want.metrics[i][name])
            assert error <= TOLERANCE, f"{name} of step {i}: {error:.1e}"
        for name in ("load", "dropped", "labels", "finite"):
            np.testing.assert_array_equal(got.metrics[i][name], want.metrics[i][name])
        for mine, theirs in zip(
            jax.tree.leaves(got.balance[i]), jax.tree.leaves(want.balance[i]), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        assert_leaves_agree(got.grads[i], want.grads[i], TOLERANCE)
    assert_leaves_agree(got.params, want.params, TOLERANCE)


def on_one_device() -> Steps:
    return steps(tuple(ONE.items()))


def name_of(case: tuple) -> str:
    sizes, accumulation, remat, exchange = case
    return "-".join(map(str, (named(sizes), accumulation, remat, *exchange.values())))


@pytest.mark.parametrize("case", WHOLE, ids=name_of)
def test_equals_one_device(case):
    sizes, accumulation, remat, exchange = case
    got = steps(tuple(sizes.items()), accumulation, remat, tuple(exchange.items()))
    assert_same_training(got, on_one_device())
    if sizes.get("expert", 1) > 1:
        assert np.all(got.metrics[0]["rounds"] > 1)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", EIGHT, ids=named)
def test_mesh_equals_one_device(sizes):
    assert_same_training(steps(tuple(sizes.items())), on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [ONE, FSDP2_EXPERT4], ids=named)
@pytest.mark.parametrize("accumulation,remat", SPLIT[1:], ids=str)
def test_microbatches_and_remat_change_nothing(sizes, accumulation, remat):
    got = steps_in_two(tuple(sizes.items()), accumulation, remat)
    assert_same_training(got, on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [ONE, *EIGHT], ids=named)
@pytest.mark.parametrize("accumulation,remat", SPLIT[1:], ids=str)
def test_full_product_with_the_whole_step_as_one_program(sizes, accumulation, remat):
    assert_same_training(steps(tuple(sizes.items()), accumulation, remat), on_one_device())


def test_the_step_has_every_part():
    """What the comparisons rest on: every path is alive, moves, and takes further rounds."""
    one = on_one_device()
    for (path, grad), before, after in zip(
        jax.tree_util.tree_leaves_with_path(one.grads[0]),
        jax.tree.leaves(start().params),
        jax.tree.leaves(one.params),
        strict=True,
    ):
        name = jax.tree_util.keystr(path)
        if "['stack0']['run0']['attn_mix']" not in name:  # layer 0 has one source: nothing to mix
            assert np.any(grad != 0) and np.any(before != after), name
    assert MODEL.moe.balance == "quantile"
    for before, after in zip(
        jax.tree.leaves(one.balance[0]), jax.tree.leaves(one.balance[1]), strict=True
    ):
        assert np.all(np.any(before != after, -1))
    assert np.all(one.metrics[0]["indexer_kl"] > 0)
    assert np.all(one.metrics[0]["rounds"] == 1)
