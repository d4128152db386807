"""Stored weights gathered at once and, as on TPUs, over one mesh axis after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.partitioning.shard import gather
from pallas_kernels.choose import lowering_for

AXES = ("embed", None)


def _gather_and_scatter(mesh, platform: str):
    """Text of the traced program, the weight as gathered, the gradient and its sharding."""
    key_w, key_x = jax.random.split(jax.random.key(0))
    w_DF = jax.device_put(
        jax.random.normal(key_w, (16, 4)), NamedSharding(mesh, P(("fsdp", "expert"), None))
    )
    x_MD = jax.device_put(
        jax.random.normal(key_x, (32, 16)), NamedSharding(mesh, P(("fsdp", "expert"), None))
    )

    def loss(w_DF, x_MD):
        whole_DF = gather(w_DF, AXES)
        return jnp.sum(jnp.sin(x_MD @ whole_DF)), whole_DF

    with jax.set_mesh(mesh), lowering_for(platform):
        # A fresh jit each: the choice is made while tracing.
        step = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x), has_aux=True))
        text = step.lower(w_DF, x_MD).as_text()
        (_, whole_DF), dw_DF = step(w_DF, x_MD)
    return text, np.asarray(whole_DF), dw_DF


@pytest.mark.parametrize("sizes", [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_axis_by_axis_gives_the_same(sizes):
    mesh = Mesh(np.array(jax.devices()).reshape(sizes), ("fsdp", "expert"))
    once, whole, dw = _gather_and_scatter(mesh, "cpu")
    staged, staged_whole, staged_dw = _gather_and_scatter(mesh, "tpu")
    np.testing.assert_array_equal(staged_whole, whole)
    np.testing.assert_allclose(staged_dw, dw, rtol=1e-5, atol=1e-5)
    assert staged_dw.sharding.is_equivalent_to(dw.sharding, 2)
    # One layout more on the way there and one on the way back, where two axes have devices.
    steps = 2 if min(sizes) > 1 else 0
    constraint = "sdy.sharding_constraint"
    assert once.count(constraint) > 0
    assert staged.count(constraint) == once.count(constraint) + steps
