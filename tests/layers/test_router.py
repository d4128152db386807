"""Choosing experts: against transformers, a plain loop, and what holds whatever the weights."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import FfnConfig, ModelConfig, MoeConfig
from moejax.layers.moe.balance import bias_step
from moejax.layers.moe.router import route, scores_of
from tests.reference.decoder import route_token

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "ops" / "router.npz"


def load(case: str) -> tuple[dict[str, np.ndarray], dict]:
    with np.load(FIXTURE) as file:
        data = {k.removeprefix(f"{case}/"): file[k] for k in file.files if k.startswith(f"{case}/")}
    _, top_k, num_groups, top_groups, renormalize = data["conf"].tolist()
    options = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
    return data, options | {"scale": data["scale"].item(), "renormalize": bool(renormalize)}


@pytest.mark.parametrize("case", ["nogroup", "group4", "group8_k6"])
def test_published_router(case):
    data, options = load(case)

    def weights_of(x, weight):
        logits = jnp.matmul(x, weight.T, precision="highest")
        ids, weights = route(logits, jnp.asarray(data["bias"]), **options)
        # The fixture lists experts ascending.
        order = jnp.argsort(ids, -1)
        sort = lambda a: jnp.take_along_axis(a, order, -1)  # noqa: E731
        return jnp.sum(sort(weights) * data["dtopk_w"]), (sort(ids), sort(weights))

    grad = jax.value_and_grad(weights_of, argnums=(0, 1), has_aux=True)
    (_, (ids, weights)), (dx, dweight) = jax.jit(grad)(data["x"], data["weight"])
    np.testing.assert_array_equal(ids, data["topk_idx_sorted"])
    np.testing.assert_allclose(weights, data["topk_w"], rtol=1e-5)
    for got, want in ((dx, data["dx"]), (dweight, data["dweight"])):
        assert np.max(np.abs(got - want)) <= 2e-5 * np.max(np.abs(want))
    load_E = np.bincount(np.ravel(ids), minlength=len(data["bias"]))
    np.testing.assert_array_equal(load_E, data["tokens_per_expert"])
    stepped = bias_step(jnp.asarray(load_E), jnp.asarray(data["bias"]), 1e-3)
    np.testing.assert_allclose(stepped, data["bias_after_sign_step_rate_1e-3"], rtol=0, atol=1e-7)


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
