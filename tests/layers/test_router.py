"""Choosing experts: against a plain loop, and what holds whatever the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import FfnConfig, ModelConfig, MoeConfig
from moejax.layers.moe.router import route, scores_of
from tests.reference.decoder import route_token


@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (3, 1), (12, 5)])
@pytest.mark.parametrize("weights_use_bias", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_a_loop_over_tokens(score, num_groups, top_groups, weights_use_bias, ties):
    rng = np.random.default_rng(0)
    logits, bias = rng.standard_normal((40, 12)), 0.3 * rng.standard_normal(12)
    if ties:  # few values, so that most choices are between equals: the lowest index wins
        logits, bias = np.round(logits), np.zeros(12)
    options = {
        "top_k": 3, "num_groups": num_groups, "top_groups": top_groups, "score": score,
        "renormalize": score == "sigmoid", "weights_use_bias": weights_use_bias,
    }  # fmt: skip
    with jax.enable_x64(True):
        ids, weights = route(jnp.asarray(logits), jnp.asarray(bias), scale=1.5, **options)
    moe = MoeConfig(num_experts=12, route_scale=1.5, expert_dim=1, **options)
    cfg = ModelConfig(moe=moe, ffn=FfnConfig())
    for t in range(len(logits)):
        want_ids, want_weights, _ = route_token(cfg, logits[t], bias)
        np.testing.assert_array_equal(ids[t], want_ids)
        np.testing.assert_allclose(weights[t], want_weights, rtol=1e-12)


def random_logits(seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((30, 8)), jnp.float32)


@pytest.mark.parametrize("scale", [1.0, 2.446])
def test_weights_sum_to_the_scale_and_do_not_see_the_bias(scale):
    """M2."""
    logits = random_logits()
    ids, weights = route(logits, jnp.zeros(8), top_k=3, scale=scale)
    np.testing.assert_allclose(weights.sum(-1), scale, rtol=1e-6)
    bias = jnp.linspace(-0.3, 0.3, 8)
    other_ids, other = route(logits, bias, top_k=3, scale=scale)
    same = np.all(np.sort(ids, -1) == np.sort(other_ids, -1), -1)
    assert 0 < same.sum() < len(same)
    np.testing.assert_allclose(np.sort(weights[same]), np.sort(other[same]), rtol=1e-6)


def test_a_constant_added_to_every_bias_changes_nothing():
    """M3."""
    bias = jnp.linspace(-0.3, 0.3, 8)
    for a, b in zip(
        route(random_logits(), bias, top_k=3),
        route(random_logits(), bias + 4.0, top_k=3),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("weights_use_bias", [False, True])
def test_the_bias_has_no_gradient(weights_use_bias):
    """M10, second half."""

    def fn(bias, logits):
        options = {"top_k": 3, "weights_use_bias": weights_use_bias}
        weights = route(logits, bias, **options)[1]
        return jnp.sum(weights * jnp.arange(3.0))

    bias_grad, logits_grad = jax.grad(fn, argnums=(0, 1))(jnp.linspace(0, 0.2, 8), random_logits())
    assert not bias_grad.any()
    assert logits_grad.any()


def test_softmax_scores_sum_to_one():
    np.testing.assert_allclose(scores_of(random_logits(), "softmax").sum(-1), 1, rtol=1e-6)
