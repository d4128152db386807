"""short_conv: the shifted form against the history form, golden numbers, packed rows."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.short_conv import short_conv, specs

IMPLS = ("chunked", "ref")
reference = functools.partial(short_conv, impl="ref")


@pytest.mark.parametrize("name", specs.CASES)
def test_shifted_equals_history(name):
    case = specs.CASES[name]
    inputs = specs.make_inputs(case)
    errors = testing.compare(short_conv, reference, inputs, activation=case.activation)
    testing.assert_close(errors, specs.TOLERANCE[case.dtype])


@pytest.mark.parametrize("impl", IMPLS)
def test_golden(impl):
    taps = jnp.array([0.1, 0.2, 0.3, 0.4])[:, None]
    x = jnp.array([1.0, 2.0, 3.0, 4.0])[None, :, None]
    y, state = short_conv(x, taps, activation=None, impl=impl)
    np.testing.assert_allclose(y.ravel(), [0.4, 1.1, 2.0, 3.0], rtol=1e-6)
    np.testing.assert_array_equal(state.ravel(), [2.0, 3.0, 4.0])


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_equals_alone(impl):
    lengths = (1, 2, 9, 30)
    inputs = specs.make_inputs(specs.Case(2, 45, 4, 6, documents=lengths))
    weights = jnp.cos(jnp.arange(2.0 * 45 * 6)).reshape(2, 45, 6)

    def run(x, segment_ids, weights):
        def loss(x):
            y, state = short_conv(x, inputs["taps"], segment_ids=segment_ids, impl=impl)
            return jnp.sum(y * weights), (y, state)

        grad, (y, state) = jax.grad(loss, has_aux=True)(x)
        return y, grad, state

    packed = run(inputs["x"], inputs["segment_ids"], weights)
    changed = run(inputs["x"].at[:, :12].mul(-2.0), inputs["segment_ids"], weights)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = run(inputs["x"][:, part], None, weights[:, part])
        for whole, own in zip(packed[:2], alone[:2], strict=True):
            assert testing.relative_rms(whole[:, part], own) < 1e-6
        start += length
    for before, after in zip(packed[:2], changed[:2], strict=True):
        np.testing.assert_array_equal(before[:, 12:], after[:, 12:])
        assert (before[:, :12] != after[:, :12]).any()


@pytest.mark.parametrize("impl", (*IMPLS, "pallas_gpu"))
@pytest.mark.parametrize("ends", ["padded", "real"])
def test_nan_in_padding_reaches_nothing(impl, ends):
    """Padding in front, between documents and at the end, in x and in the cotangent."""
    row = [0] * 2 + [1] * 7 + [0] * 2 + [2] * 8 + [0] * (4 if ends == "padded" else 0)
    segments, T = jnp.array([row], jnp.int32), len(row)
    x, dy = (jax.random.normal(jax.random.key(i), (1, T, 6)) for i in range(2))
    taps = jax.random.normal(jax.random.key(2), (4, 6))

    @jax.jit
    def results(x, dy):
        run = lambda x, taps: short_conv(x, taps, segment_ids=segments, impl=impl)  # noqa: E731
        (y, state), pullback = jax.vjp(run, x, taps)
        return y, state, *pullback((dy, jnp.ones_like(state)))

    padding = (segments == 0)[..., None]
    spoilt = results(jnp.where(padding, jnp.nan, x), jnp.where(padding, jnp.nan, dy))
    for a, b in zip(spoilt, results(x, dy), strict=True):
        assert jnp.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    for a in (spoilt[0], spoilt[2]):
        np.testing.assert_array_equal(jnp.where(padding, a, 0), 0)
    assert jnp.any(spoilt[1]) == (ends == "real")


@pytest.mark.parametrize("cut", [1, 2, 3, 17])
def test_two_runs_with_carried_state_equal_one(cut):
    inputs = specs.make_inputs(specs.Case(2, 20, 4, 6, documents=(5, 15)))
    x, taps, ids = (inputs[n] for n in ("x", "taps", "segment_ids"))
    whole, final = short_conv(x, taps, segment_ids=ids)
    first, state = short_conv(x[:, :cut], taps, segment_ids=ids[:, :cut])
    same = (ids[:, cut - 1] == ids[:, cut])[:, None, None]  # a state is its own document's
    second, last = short_conv(
        x[:, cut:], taps, segment_ids=ids[:, cut:], initial_state=jnp.where(same, state, 0)
    )
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, rtol=1e-6)
    np.testing.assert_array_equal(last, final)


def test_dtypes_and_refusals(monkeypatch, strict_promotion):
    inputs = specs.make_inputs(specs.CASES["low_precision"])
    y, state = short_conv(**inputs)
    assert y.dtype == state.dtype == jnp.bfloat16
    with jax.enable_x64(True):
        assert (
            short_conv(jnp.ones((1, 3, 2), jnp.float64), jnp.ones((4, 2)))[0].dtype == jnp.float64
        )
    with pytest.raises(ValueError, match="Use 'silu' or None"):
        short_conv(**inputs, activation="relu")
    with pytest.raises(NotImplementedError, match="no Pallas kernel"):
        short_conv(**inputs, impl="pallas")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for wrong in ({"taps": jnp.ones((4, 5))}, {"initial_state": jnp.ones((2, 4, 6))}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            short_conv(**{**inputs, **wrong})
