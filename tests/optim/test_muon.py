"""Muon: Newton-Schulz values, per-head blocks, and batching against one matrix at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.optim.muon import COEFFICIENTS, muon_direction, newton_schulz, rms_factor
from moejax.partitioning.param_info import ParamInfo

HEADS = ParamInfo("q", ("embed", "heads", None), 1, (-3, -1), -2)
PLAIN = ParamInfo("w", ("embed", None), 0, (-2, -1))


def plain_ns(x, steps=5):
    """One matrix, float64, as section 7.1 writes it."""
    a, b, c = COEFFICIENTS
    y = np.asarray(x, np.float64)
    if not y.any():
        return y
    y = y / np.linalg.norm(y)
    if y.shape[0] > y.shape[1]:
        return plain_ns(x.T, steps).T
    for _ in range(steps):
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def run(info, grads, **options):
    """Directions of a list of gradients of one parameter."""
    tx = muon_direction([info], **options)
    state = tx.init({"w": grads[0]})
    update = jax.jit(tx.update)
    out = []
    for grad in grads:
        direction, state = update({"w": grad}, state)
        out.append(direction["w"])
    return out


def test_iterates_of_one_are_golden():
    got = [newton_schulz(jnp.ones((1, 1)), steps).item() for steps in range(1, 6)]
    np.testing.assert_allclose(got, [0.701, 1.113620, 0.720706, 1.089974, 0.696436], rtol=2e-6)


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (200, 80)])
def test_gaussian_input_gets_singular_values_near_one(shape):
    """Five steps map a singular value above 0.02 of the norm into 0.6818 to 1.2015."""
    x = random(*shape)
    ratios = np.linalg.svd(x, compute_uv=False) / np.linalg.norm(x)
    values = np.linalg.svd(jax.jit(newton_schulz)(x), compute_uv=False)
    clear = ratios > 0.02
    assert clear.sum() >= 0.8 * min(shape)
    assert values[: clear.sum()].min() > 0.6 and values.max() < 1.202
    direction = run(PLAIN, [x])[0]
    assert 0.16 < float(jnp.sqrt(jnp.mean(direction**2))) < 0.18


@pytest.mark.parametrize("shape", [(8, 8), (8, 32), (48, 16)])
def test_orthogonal_direction_has_rms_one_fifth(shape):
    q = np.linalg.qr(np.asarray(random(max(shape), min(shape))))[0]
    q = q if shape[0] > shape[1] else q.T
    assert rms_factor(*shape) * np.sqrt(np.mean(q**2)) == pytest.approx(0.2, rel=1e-6)


def test_one_head_alone_is_the_whole_matrix():
    grads = [random(2, 24, 1, 8, seed=s) for s in (0, 1)]
    for a, b in zip(run(HEADS, grads), run(HEADS, grads, per_head=False), strict=True):
        np.testing.assert_array_equal(a, b)


def test_rotating_one_head_leaves_the_others_bit_equal():
    grads = [random(2, 24, 4, 8, seed=s) for s in (0, 1)]
    rotation = jnp.linalg.qr(random(24, 24, seed=9))[0]
    turned = [g.at[1, :, 2].set(rotation @ g[1, :, 2]) for g in grads]
    for a, b in zip(run(HEADS, grads), run(HEADS, turned), strict=True):
        same = np.asarray(a == b).all(axis=(1, 3))
        expected = np.ones((2, 4), bool)
        expected[1, 2] = False
        np.testing.assert_array_equal(same, expected)
        np.testing.assert_allclose(rotation @ a[1, :, 2], b[1, :, 2], atol=2e-5)


def test_whole_matrix_couples_the_heads():
    grad = random(1, 24, 4, 8)
    changed = run(HEADS, [grad.at[0, :, 2].multiply(3.0)], per_head=False)[0]
    whole = run(HEADS, [grad], per_head=False)[0]
    assert float(jnp.abs(changed[0, :, 0] - whole[0, :, 0]).max()) > 1e-3
    expected = rms_factor(24, 32) * plain_ns(np.asarray(grad).reshape(24, 32))
    np.testing.assert_allclose(whole.reshape(24, 32), expected, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-25, 3e-7, 1e15])
def test_scale_of_the_gradient_history_does_not_matter(scale):
    grads = [random(24, 16, seed=s) for s in (0, 1, 2)]
    scaled = [g * jnp.float32(scale) for g in grads]
    for a, b in zip(run(PLAIN, grads), run(PLAIN, scaled), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_zero_gradient_gives_zero():
    assert not np.asarray(run(PLAIN, [jnp.zeros((8, 4))])[0]).any()


def test_batched_leaves_equal_one_matrix_at_a_time():
    """Leaves of one shape, and its transpose, go as one batch; each must come back to its place."""
    cases = {
        "heads": (HEADS, (3, 24, 4, 8)),
        "gate_up": (
            ParamInfo("e", ("experts", "embed", None, "ffn"), 2, (-3, -1)),
            (2, 2, 3, 8, 2, 24),
        ),
        "flat": (ParamInfo("o", (None, "embed"), 1, (-2, -1)), (2, 8, 24)),
        "other": (ParamInfo("r", ("embed", None), 0, (-2, -1)), (24, 10)),
    }
    infos = [cases[name][0] for name in sorted(cases)]
    tx = muon_direction(infos, momentum=0.9)
    grads = [
        {name: random(*shape, seed=7 * s + i) for i, (name, (_, shape)) in enumerate(cases.items())}
        for s in (1, 2)
    ]
    state = tx.init(grads[0])
    for grad in grads:
        got, state = jax.jit(tx.update)(grad, state)
    for name, (info, _) in cases.items():
        g1, g2 = (np.asarray(g[name], np.float64) for g in grads)
        ahead = g2 + 0.9 * (0.9 * g1 + g2)
        ahead, mine = (
            np.moveaxis(x, info.matrix, (-2, -1)) for x in (ahead, np.asarray(got[name]))
        )
        for index in np.ndindex(ahead.shape[:-2]):
            rows, cols = ahead.shape[-2:]
            expected = 0.2 * max(rows, cols) ** 0.5 * plain_ns(ahead[index])
            np.testing.assert_allclose(mine[index], expected, atol=2e-5, err_msg=f"{name}{index}")


def test_param_info_refuses_impossible_matrices():
    with pytest.raises(ValueError, match="w: matrix=\\(-2, -4\\).*different dims from -3 to -1"):
        ParamInfo("w", ("a", "b", None), 0, (-2, -4))
    with pytest.raises(ValueError, match="w: head_axis=-3 must stand right before"):
        ParamInfo("w", ("a", "b", None, None, None), 0, (-4, -1), -3)
    with pytest.raises(ValueError, match="needs matrix"):
        ParamInfo("w", ("a",), 0, None, -1)
    with pytest.raises(ValueError, match="has shape \\(3, 4, 5\\), but stack=0"):
        run(PLAIN, [random(3, 4, 5)])
