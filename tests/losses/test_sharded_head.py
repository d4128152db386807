"""A head in pieces: the reference's loss and gradients on one device and four; budgets kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.losses import cross_entropy
from moejax.losses.budget import LEAST_VOCAB, plan_loss
from moejax.losses.sharded_head import sharded_head_loss
from moejax.partitioning import make_mesh

M, V, D = 4 * 37, 150, 16
SIZES = [(10, 64), (37, 150), (1000, 50), (1, 149)]


def arrays(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    labels = jax.random.randint(keys[2], (M,), 0, V).at[::5].set(-100)
    x, table = jax.random.normal(keys[0], (M, D)), jax.random.normal(keys[1], (V, D))
    return x.astype(dtype), table, labels


def reference(x, table, labels):
    logits = jnp.where((labels >= 0)[:, None], x, 0).astype(jnp.float32) @ table.T
    return cross_entropy(logits, labels, z_loss=1e-3)[0] / 7


@pytest.mark.parametrize(("rows", "vocab"), SIZES)
@pytest.mark.parametrize("devices", [1, 4])
def test_loss_and_gradients_are_those_of_whole_logits(rows, vocab, devices):
    x, table, labels = arrays(jnp.float32)
    want = jax.value_and_grad(reference, (0, 1))(x, table, labels)
    poisoned = jnp.where((labels >= 0)[:, None], x, jnp.nan)  # rows without a label

    def loss(x, table):
        axes = ("vocab", "embed")
        return sharded_head_loss(x, table, labels, axes, rows=rows, vocab=vocab, z_loss=1e-3) / 7

    run = jax.jit(jax.value_and_grad(loss, (0, 1)))
    if devices == 1:
        got = run(poisoned, table)
    else:
        with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, expert=2), jax.devices()[:4])):
            got = run(poisoned, table)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("wanted", "products"), [((0,), 3), ((0, 1), 4)])
def test_the_gradient_of_a_frozen_head_is_not_formed(wanted, products):
    x, table, labels = arrays(jnp.bfloat16)

    def loss(x, table):
        return sharded_head_loss(x, table, labels, ("vocab", "embed"), rows=40, vocab=64)

    grad = jax.grad(loss, wanted)
    assert jax.jit(grad).lower(x, table).as_text().count("stablehlo.dot_general") == products
    assert [d.dtype for d in jax.eval_shape(grad, x, table)] == [jnp.bfloat16, jnp.float32][
        : len(wanted)
    ]


K3 = {"num_rows": 131_072, "num_vocab": 163_840, "dim": 7168, "itemsize": 2, "num_shards": 128}


@pytest.mark.parametrize("trained", [False, True])
def test_chunks_of_k3_fit_a_gibibyte_and_say_why(trained):
    plan = plan_loss(**K3, trained=trained, budget=2**30)
    assert not plan.whole_head and plan.temp_bytes <= 2**30
    assert plan.vocab == LEAST_VOCAB and K3["num_rows"] % plan.rows == 0
    assert "in pieces" in plan.reason and "more than 1.00 GiB" in plan.reason
    roomy = plan_loss(**K3, trained=trained, budget=3 * 2**30)
    assert roomy.rows > plan.rows  # what more there is goes to the rows


def test_a_head_that_fits_is_whole_and_sizes_that_are_given_stand():
    assert plan_loss(**K3, trained=False, budget=16 * 2**30).whole_head
    assert plan_loss(**K3, trained=True, budget=0).whole_head
    plan = plan_loss(**K3, trained=True, budget=2**30, rows=2048, vocab=2000)
    assert (plan.rows, plan.vocab) == (2048, 2000)
    plan = plan_loss(**K3, trained=True, budget=2**20)
    assert plan.temp_bytes > 2**20 and "exceeded" in plan.reason
