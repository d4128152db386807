"""The two losses agree with each other and with the oracle."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.losses import chunked_cross_entropy, cross_entropy, mean_loss
from pallas_kernels.testing import relative_rms

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "ops" / "cross_entropy.npz"


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("mean", {}),
        ("label_smoothing_0.1", {"label_smoothing": 0.1}),
        ("zloss_1e-3_mean", {"z_loss": 1e-3}),
    ],
)
def test_plain_loss_equals_oracle(variant, options):
    data = {k.removeprefix("n37/"): v for k, v in np.load(FIXTURE).items() if "n37/" in k}
    labels = jnp.array(data["labels"])

    def loss(x, weight):
        return mean_loss(*cross_entropy(x @ weight.T, labels, **options))

    arrays = jnp.array(data["x"]), jnp.array(data["W"])
    value, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    assert abs(float(value) - data[f"{variant}/loss"]) <= 1e-6 * data[f"{variant}/loss"]
    for actual, name in zip(grads, ("dx", "dW"), strict=True):
        expected = data[f"{variant}/{name}"]
        assert np.abs(actual - expected).max() <= 1e-5 * max(np.abs(expected).max(), 1e-3)


@pytest.mark.parametrize("chunks", [(1, None), (7, 50), (30, 131), (100, 200)])
def test_chunked_loss_equals_plain_loss(chunks):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 15, 8))
    weight = jax.random.normal(keys[1], (131, 8))
    # a whole chunk of 7 without a label
    labels = jax.random.randint(keys[2], (2, 15), 0, 131).at[0, 5:].set(-100)
    options = {"label_smoothing": 0.05, "z_loss": 1e-4}

    def plain(hidden, weight):
        return mean_loss(*cross_entropy(hidden @ weight.T, labels, **options))

    def chunked(hidden, weight):
        sizes = {"rows_per_chunk": chunks[0], "vocab_per_chunk": chunks[1]}
        return mean_loss(*chunked_cross_entropy(hidden, weight, labels, **options, **sizes))

    results = [
        jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(hidden, weight) for fn in (chunked, plain)
    ]
    for actual, expected in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative_rms(actual, expected) <= 1e-6


def test_no_label_gives_zero_and_zero_gradient():
    labels = jnp.full((2, 3), -100)
    hidden, weight = jnp.ones((2, 3, 4)), jnp.ones((5, 4))
    for fn in (
        lambda h, w: mean_loss(*chunked_cross_entropy(h, w, labels)),
        lambda h, w: mean_loss(*cross_entropy(h @ w.T, labels)),
    ):
        value, grads = jax.value_and_grad(fn, argnums=(0, 1))(hidden, weight)
        assert float(value) == 0
        assert not any(np.any(g) for g in grads)
