"""A training step is the same on any mesh, in any number of microbatches, with or without remat.

Measure: a leaf's largest difference over its largest magnitude, or over `FLOOR` of the largest
magnitude in the whole tree where the leaf is smaller than that.
"""

import jax
import numpy as np
import pytest

from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    assert_leaves_agree,
    named,
    relative_error,
)
from tests.sharded.stepping import MODEL, UPDATES, Steps, start, steps

TOLERANCE, FLOOR = 1e-5, 1e-4
EIGHT = [FSDP8, EXPERT8, FSDP2_EXPERT4, DATA2_FSDP2_EXPERT2]
SPLIT = [(n, policy) for policy in ("none", "full") for n in (1, 2, 4)]


def largest(tree) -> float:
    return max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(tree))


def assert_same_training(got: Steps, want: Steps) -> None:
    """Loss, norm, routing and balancing of each step, every gradient, the last parameters."""
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
    floor = FLOOR * largest(want.grads[0])
    assert_leaves_agree(got.grads[0], want.grads[0], TOLERANCE, floor)
    assert_leaves_agree(got.params, want.params, TOLERANCE, FLOOR * largest(want.params))


def on_one_device() -> Steps:
    return steps(tuple(ONE.items()))


@pytest.mark.parametrize("sizes", EIGHT, ids=named)
def test_mesh_equals_one_device(sizes):
    assert_same_training(steps(tuple(sizes.items())), on_one_device())


@pytest.mark.parametrize("sizes", [ONE, FSDP2_EXPERT4], ids=named)
@pytest.mark.parametrize("accumulation,remat", SPLIT[1:], ids=str)
def test_microbatches_and_remat_change_nothing(sizes, accumulation, remat):
    assert_same_training(steps(tuple(sizes.items()), accumulation, remat), on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FSDP8, EXPERT8, DATA2_FSDP2_EXPERT2], ids=named)
@pytest.mark.parametrize("accumulation,remat", SPLIT[1:], ids=str)
def test_microbatches_and_remat_change_nothing_on_other_meshes(sizes, accumulation, remat):
    assert_same_training(steps(tuple(sizes.items()), accumulation, remat), on_one_device())


def test_the_step_has_every_part():
    """What the comparisons rest on: every path is alive, moves, and takes further rounds."""
    one, eight = on_one_device(), steps(tuple(FSDP2_EXPERT4.items()))
    for path, grad in jax.tree_util.tree_leaves_with_path(one.grads[0]):
        assert np.any(grad != 0) or "attn_mix" in jax.tree_util.keystr(path), path
    moved = jax.tree.map(lambda a, b: np.any(a != b), one.params, start().params)
    assert all(jax.tree.leaves(moved))
    assert MODEL.moe.balance == "quantile"
    for before, after in zip(
        jax.tree.leaves(one.balance[0]), jax.tree.leaves(one.balance[1]), strict=True
    ):
        assert np.all(np.any(before != after, -1))
    assert np.all(one.metrics[0]["indexer_kl"] > 0)
    assert np.all(one.metrics[0]["rounds"] == 1) and np.all(eight.metrics[0]["rounds"] > 1)
