"""Kernels of attn_res and gated_norm for GPUs and TPUs, interpreted, against the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.attn_res import specs as attn_res_specs
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gated_norm import specs as gated_norm_specs
from pallas_kernels.short_conv import short_conv
from pallas_kernels.short_conv import specs as short_conv_specs
from pallas_kernels.testing import assert_close, compare

EPS = 1e-5
KERNELS = ("pallas_gpu", "pallas_tpu")
# programs that are full, and one that is not
ATTN_RES = attn_res_specs.CASES | {
    "long": attn_res_specs.Case(num_sources=9, used=8, batch=1, length=257, width=16),
}
GATED_NORM = gated_norm_specs.CASES | {
    # more than one program, the last one cut short, on GPUs; and on TPUs
    "rows": gated_norm_specs.Case((1, 257, 2, 128)),
    "wide": gated_norm_specs.Case((17, 2050), dtype="bfloat16"),
}
SHORT_CONV = {
    "as_many_as_taps": short_conv_specs.Case(2, 3, 3, 6, activation=None),
    # borders of documents before, at and behind that of two programs
    "packed": short_conv_specs.Case(2, 260, 4, 6, documents=(1, 2, 123, 2, 1, 100)),
    "low_precision": short_conv_specs.Case(1, 65, 4, 520, dtype="bfloat16"),
}


def _mix(impl, used):
    return lambda query, norm_weight, sources: attn_res(
        query, norm_weight, sources, num_sources=used, eps=EPS, impl=impl
    )


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("name", ATTN_RES)
def test_attn_res_equals_reference(name, impl):
    case = ATTN_RES[name]
    arrays = attn_res_specs.make_inputs(case)
    inputs = dict(zip(("query", "norm_weight", "sources"), arrays, strict=True))
    used = case.used if name == "odd" else jnp.int32(case.used)
    errors = compare(_mix(impl, used), _mix("ref", used), inputs)
    assert_close(errors, attn_res_specs.TOLERANCES[case.dtype])


@pytest.mark.parametrize("impl", KERNELS)
def test_unused_sources_may_hold_nan(impl):
    case = attn_res_specs.CASES["bfloat16"]

    @jax.jit
    def value_and_grads(query, norm_weight, sources, used):
        out, pullback = jax.vjp(_mix(impl, used), query, norm_weight, sources)
        return out, *pullback(jnp.cos(out))

    used = jnp.int32(case.used)
    clean = value_and_grads(*attn_res_specs.make_inputs(case), used)
    poisoned = value_and_grads(*attn_res_specs.make_inputs(case, unused=jnp.nan), used)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[3][case.used :], 0)
    assert all(np.isfinite(a).all() for a in poisoned)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("name", GATED_NORM)
def test_gated_norm_equals_reference(name, impl):
    case = GATED_NORM[name]
    errors = compare(
        lambda **a: gated_norm(**a, eps=case.eps, impl=impl),
        lambda **a: gated_norm(**a, eps=case.eps, impl="ref"),
        gated_norm_specs.make_inputs(case),
        # as the kernel gets it, so that what bfloat16 rounds once at the end is all of the error
        cotangents=[jax.random.normal(jax.random.key(7), case.shape).astype(case.dtype)],
    )
    assert_close(errors, {"float32": 1e-6, "bfloat16": 2e-3}[case.dtype])


@pytest.mark.parametrize("impl", KERNELS)
def test_float64_is_refused(impl):
    with jax.enable_x64(True):
        x = jnp.ones((2, 8), jnp.float64)
        with pytest.raises(NotImplementedError, match="float64"):
            gated_norm(x, x, x[0], eps=EPS, impl=impl)
        with pytest.raises(NotImplementedError, match="float64"):
            attn_res(x[0], x[0], x[:, None, None], eps=EPS, impl=impl)


@pytest.mark.parametrize("name", SHORT_CONV)
def test_short_conv_equals_reference(name):
    case = SHORT_CONV[name]
    inputs = short_conv_specs.make_inputs(case)
    state = (case.B, case.K - 1, case.X)
    cotangents = [
        jax.random.normal(jax.random.key(i), shape).astype(case.dtype)
        for i, shape in enumerate((inputs["x"].shape, state))
    ]
    errors = compare(
        lambda **a: short_conv(**a, activation=case.activation, impl="pallas_gpu"),
        lambda **a: short_conv(**a, activation=case.activation, impl="ref"),
        inputs, cotangents=cotangents,
    )  # fmt: skip
    assert_close(errors, {"float32": 1e-6, "bfloat16": 4e-3}[case.dtype])


def test_other_documents_of_short_conv_may_hold_nan():
    case = SHORT_CONV["packed"]
    inputs = short_conv_specs.make_inputs(case)
    segment_ids = inputs["segment_ids"]
    padding = segment_ids[0] == 0

    @jax.jit
    def value_and_grads(x, dy):
        fn = lambda x, taps: short_conv(x, taps, segment_ids=segment_ids, impl="pallas_gpu")[0]  # noqa: E731
        y, pullback = jax.vjp(fn, x, inputs["taps"])
        return y, pullback(dy)[0]

    dy = jnp.cos(inputs["x"])
    clean = value_and_grads(inputs["x"], dy)
    poisoned = value_and_grads(inputs["x"].at[:, padding].set(jnp.nan), dy)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a[:, ~padding], b[:, ~padding])


def test_short_conv_refuses_an_initial_state():
    inputs = short_conv_specs.make_inputs(short_conv_specs.CASES["odd"])
    with pytest.raises(NotImplementedError, match="first position"):
        short_conv(**inputs, impl="pallas_gpu")
