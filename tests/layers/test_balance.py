"""Balancing: golden numbers of the quantile form, its histogram form, bias step, auxiliary loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import MoeConfig
from moejax.layers.moe import balance
from moejax.layers.moe.router import route

SCORES = np.array(
    [
        (0.9, 0.6, 0.3, 0.1), (0.8, 0.5, 0.4, 0.2), (0.85, 0.7, 0.2, 0.15), (0.7, 0.4, 0.35, 0.3),
        (0.5, 0.9, 0.3, 0.2), (0.45, 0.8, 0.4, 0.25), (0.4, 0.75, 0.5, 0.1), (0.2, 0.3, 0.6, 0.35),
    ]
)  # fmt: skip


def load_of(scores, bias, top_k):
    """Tokens of each expert, by a stable sort in NumPy."""
    chosen = np.argsort(-(np.asarray(scores) + np.asarray(bias)), axis=-1, kind="stable")
    return np.bincount(chosen[:, :top_k].ravel(), minlength=scores.shape[-1])


def test_golden_quantile_updates():
    with jax.enable_x64(True):
        biases = [jnp.zeros(4)]
        for _ in range(5):
            biases.append(balance.quantile_bias(jnp.asarray(SCORES), biases[-1], 1))
    want = {
        1: (-0.19375, -0.19375, 0.13125, 0.25625),
        4: (-0.2859375, -0.1859375, 0.1234375, 0.3484375),
        5: (-0.29296875, -0.18046875, 0.12421875, 0.34921875),
    }
    for update, value in want.items():
        np.testing.assert_allclose(biases[update], value, rtol=0, atol=1e-12)
    loads = {0: (4, 3, 1, 0), 1: (3, 2, 2, 1), 4: (2, 2, 2, 2), 5: (2, 2, 2, 2)}
    for update, value in loads.items():
        np.testing.assert_array_equal(load_of(SCORES, biases[update], 1), value)


def skewed_scores(num_tokens: int = 512, num_experts: int = 8) -> np.ndarray:
    """Scores that send nearly every token to the last experts."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((num_tokens, num_experts)) + np.linspace(-3, 3, num_experts)
    return (1 / (1 + np.exp(-logits))).astype(np.float32)


def histogram_update(scores, bias, top_k, valid=None):
    valid = np.ones(len(scores), bool) if valid is None else valid
    counts = balance.histogram(jnp.asarray(scores), bias, jnp.asarray(valid), top_k)
    return balance.quantile_from_histogram(counts, bias, top_k)


@pytest.mark.parametrize("form", ["sort", "histogram"])
@pytest.mark.parametrize("top_k", [1, 3])
def test_updates_lead_to_an_even_load(form, top_k):
    """M8: mean(b) stays 0, and the fixed point gives every expert m k / n tokens."""
    scores, start = jnp.asarray(skewed_scores()), jnp.zeros(8)
    even = len(scores) * top_k / 8
    assert load_of(scores, start, top_k).max() > 1.5 * even
    update = balance.quantile_bias if form == "sort" else histogram_update
    bias = jax.lax.fori_loop(0, 300, lambda _, bias: update(scores, bias, top_k), start)
    assert abs(float(bias.mean())) < 1e-6
    off = np.abs(load_of(scores, bias, top_k) - even)
    if form == "sort":
        np.testing.assert_array_equal(off, 0)
    else:  # as many tokens as lie within a bin of the threshold
        width = (float(bias.max() - bias.min()) + 2) / balance.NUM_BINS
        required = np.asarray(balance.required_bias(scores, bias, top_k))
        near = np.sum(np.abs(required - np.asarray(bias)) <= width, axis=0)
        assert (off <= near).all() and off.max() < even / 4


@pytest.mark.parametrize("top_k", [1, 3])
def test_histogram_form_is_within_a_bin_of_the_order_statistic(top_k):
    """M8, of the ceil(mk/n)-th smallest required bias, before the mean is taken off."""
    scores, bias = skewed_scores(300), jnp.linspace(-0.4, 0.4, 8)
    required = np.sort(balance.required_bias(jnp.asarray(scores), bias, top_k), axis=0)
    rank = int(np.ceil(len(scores) * top_k / 8))
    want = required[rank - 1] - required[rank - 1].mean()
    width = (float(bias.max() - bias.min()) + 2) / balance.NUM_BINS
    got = np.asarray(histogram_update(scores, bias, top_k))
    assert np.max(np.abs(got - want)) <= 2 * width  # one bin of its own, one of the mean


def test_histograms_of_parts_add_up_and_skip_padding():
    scores, bias = skewed_scores(64), jnp.zeros(8)
    valid = np.arange(64) % 5 != 0
    whole = balance.histogram(jnp.asarray(scores), bias, jnp.asarray(valid), 3)
    parts = [
        balance.histogram(jnp.asarray(scores[i : i + 16]), bias, jnp.asarray(valid[i : i + 16]), 3)
        for i in range(0, 64, 16)
    ]
    np.testing.assert_array_equal(whole, sum(parts))
    np.testing.assert_array_equal(whole.sum(-1), valid.sum())
    ones = jnp.ones(valid.sum(), bool)
    np.testing.assert_array_equal(
        whole, balance.histogram(jnp.asarray(scores[valid]), bias, ones, 3)
    )


def test_stacked_layers_update_each_for_itself():
    scores = [skewed_scores(64), skewed_scores(64)[:, ::-1].copy()]
    biases = jnp.stack([jnp.zeros(8), jnp.linspace(-0.1, 0.1, 8)])
    valid = jnp.ones(64, bool)
    counts = jnp.stack(
        [
            balance.histogram(jnp.asarray(s), b, valid, 2)
            for s, b in zip(scores, biases, strict=True)
        ]
    )
    got = balance.quantile_from_histogram(counts[None], biases[None], 2)
    for layer in range(2):
        want = balance.quantile_from_histogram(counts[layer], biases[layer], 2)
        np.testing.assert_allclose(got[0, layer], want, rtol=0, atol=1e-6)


def test_the_bias_stays_where_nothing_can_be_learned():
    bias = jnp.linspace(-0.5, 0.5, 4)
    no_tokens = jnp.zeros((4, balance.NUM_BINS), jnp.int32)
    np.testing.assert_array_equal(balance.quantile_from_histogram(no_tokens, bias, 2), bias)
    np.testing.assert_array_equal(histogram_update(SCORES.astype(np.float32), bias, 4), bias)
    np.testing.assert_array_equal(
        balance.quantile_bias(jnp.asarray(SCORES, jnp.float32), bias, 4), bias
    )


def test_bias_step_moves_against_the_load():
    load = jnp.asarray([[5, 3, 1], [2, 2, 2]])
    got = balance.bias_step(load, jnp.zeros((2, 3)), 0.25)
    np.testing.assert_array_equal(got, [[-0.25, 0, 0.25], [0, 0, 0]])


def test_each_balancing_changes_the_bias_as_its_name_says():
    bias, load = jnp.zeros(4), jnp.asarray(load_of(SCORES, np.zeros(4), 1))
    valid = jnp.ones(8, bool)
    counts = balance.histogram(jnp.asarray(SCORES, jnp.float32), bias, valid, 1)
    small = {"num_experts": 4, "top_k": 1, "bias_rate": 0.5, "aux_weight": 0.1}
    new = lambda kind: balance.new_bias(MoeConfig(balance=kind, **small), bias, load, counts)  # noqa: E731
    np.testing.assert_array_equal(new("bias_step"), [-0.5, -0.5, 0.5, 0.5])
    np.testing.assert_array_equal(new("quantile"), balance.quantile_from_histogram(counts, bias, 1))
    assert new("quantile").any()
    for kind in ("aux", "none"):
        np.testing.assert_array_equal(new(kind), bias)


def test_auxiliary_loss():
    """1 at perfect balance, E/A where one expert takes all; padding does not count."""
    even = jnp.full((1, 4, 4), 0.5)
    ids = jnp.asarray([[[0], [1], [2], [3]]])
    everyone = jnp.ones((1, 4), bool)
    np.testing.assert_allclose(balance.aux_loss_rows(even, ids, everyone), [1.0], rtol=1e-6)
    one_hot = jnp.zeros((1, 4, 4)).at[..., 2].set(0.7)
    np.testing.assert_allclose(
        balance.aux_loss_rows(one_hot, jnp.full((1, 4, 1), 2), everyone), [4.0], rtol=1e-6
    )
    scores = jnp.asarray(skewed_scores(12)[None])
    ids, _ = route(jnp.log(scores / (1 - scores)), jnp.zeros(8), top_k=2)
    valid = jnp.arange(12)[None] >= 5
    want = 0.0
    for e in range(8):
        share = np.mean([scores[0, t, e] / scores[0, t].sum() for t in range(5, 12)])
        want += share * 8 / (2 * 7) * np.sum(np.asarray(ids)[0, 5:] == e)
    np.testing.assert_allclose(balance.aux_loss_rows(scores, ids, valid), [want], rtol=1e-5)


def test_auxiliary_loss_pushes_scores_of_busy_experts_down():
    scores = jnp.full((1, 4, 4), 0.5)
    ids = jnp.asarray([[[0], [0], [0], [1]]])
    grad = jax.grad(lambda s: balance.aux_loss_rows(s, ids, jnp.ones((1, 4), bool)).sum())(scores)
    assert (grad[..., 0] > 0).all() and (grad[..., 2:] < 0).all()
