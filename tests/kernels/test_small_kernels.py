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
ATTN_RES = {
    "one_source": attn_res_specs.CASES["one_source"],
    # programs that are full, and one that is not
    "odd": attn_res_specs.CASES["odd"],
    "bfloat16": attn_res_specs.Case(
        num_sources=9, used=7, batch=1, length=5, width=130, dtype="bfloat16"
    ),
}
GATED_NORM = {name: gated_norm_specs.CASES[name] for name in ("vector", "large_values")} | {
    # more than one program, the last one cut short
    "rows": gated_norm_specs.Case((1, 257, 2, 128)),
    "wide": gated_norm_specs.Case((17, 2050), dtype="bfloat16"),
}
SHORT_CONV = {
    "as_many_as_taps": short_conv_specs.Case(2, 3, 3, 6, activation=None),
    # borders of documents before, at and behind that of two programs
    "packed": short_conv_specs.Case(2, 260, 4, 6, documents=(1, 2, 123, 2, 1, 100)),
    "low_precision": short_conv_specs.Case(1, 65, 4, 520, dtype="bfloat16"),
}


def _normal(*shapes, dtype="float32", seed=0):
    """Normal numbers, without a program to compile."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def _sources(case):
    return _normal(
        (case.width,), (case.width,), (case.num_sources, case.batch, case.length, case.width),
        dtype=case.dtype,
    )  # fmt: skip


def _mix(impl, used):
    return lambda query, norm_weight, sources: attn_res(
        query, norm_weight, sources, num_sources=used, eps=EPS, impl=impl
    )


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("name", ATTN_RES)
def test_attn_res_equals_reference(name, impl):
    case = ATTN_RES[name]
    arrays = _sources(case)
    inputs = dict(zip(("query", "norm_weight", "sources"), arrays, strict=True))
    used = case.used if name == "odd" else jnp.int32(case.used)
    # the cotangent as the kernel gets it, so that the one rounding at the end is all of the error
    cotangents = _normal((case.batch, case.length, case.width), dtype=case.dtype, seed=1)
    errors = compare(_mix(impl, used), _mix("ref", used), inputs, cotangents=cotangents)
    assert_close(errors, {"float32": 1e-6, "bfloat16": 4e-3}[case.dtype])


@pytest.mark.parametrize("impl", KERNELS)
def test_unused_sources_may_hold_nan(impl):
    case = ATTN_RES["bfloat16"]

    @jax.jit
    def value_and_grads(query, norm_weight, sources, used):
        out, pullback = jax.vjp(_mix(impl, used), query, norm_weight, sources)
        return out, *pullback(jnp.cos(out))

    used = jnp.int32(case.used)
    query, norm_weight, sources = _sources(case)
    clean = value_and_grads(query, norm_weight, sources, used)
    sources = sources.at[case.used :].set(jnp.nan)
    poisoned = value_and_grads(query, norm_weight, sources, used)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[3][case.used :], 0)
    assert all(np.isfinite(a).all() for a in poisoned)


@pytest.mark.parametrize("impl", KERNELS)
def test_attn_res_on_a_mesh_equals_one_device(impl):
    query, norm_weight, sources = _normal((8,), (8,), (3, 2, 5, 8))
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P(None, "rows"), jax.P()
    fn = _mix(impl, jnp.int32(2))
    spread = jax.shard_map(
        fn, mesh=mesh, in_specs=(whole, whole, rows), out_specs=jax.P("rows"), check_vma=False
    )

    def value_and_grads(fn):
        def run(*args):
            out, pullback = jax.vjp(fn, *args)
            return out, *pullback(jnp.sin(out))

        return jax.jit(run)(query, norm_weight, sources)

    one, two = value_and_grads(fn), value_and_grads(spread)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), one, two)


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("name", GATED_NORM)
def test_gated_norm_equals_reference(name, impl):
    case = GATED_NORM[name]
    x, gate, dy = _normal(case.shape, case.shape, case.shape, dtype=case.dtype)
    (weight,) = _normal(case.shape[-1:], seed=1)
    errors = compare(
        lambda **a: gated_norm(**a, eps=case.eps, impl=impl),
        lambda **a: gated_norm(**a, eps=case.eps, impl="ref"),
        {"x": x * jnp.asarray(case.size, x.dtype), "gate": gate, "weight": weight},
        cotangents=[dy],
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


def _conv_inputs(case):
    """x, taps, documents, and cotangents of output and state."""
    shape, state = (case.B, case.T, case.X), (case.B, case.K - 1, case.X)
    x, dy, d_state = _normal(shape, shape, state, dtype=case.dtype)
    (taps,) = _normal((case.K, case.X), seed=1)
    row = np.zeros((case.B, case.T), np.int32)
    row[:, : sum(case.documents)] = np.repeat(np.arange(1, 1 + len(case.documents)), case.documents)
    segment_ids = jnp.asarray(row) if case.documents else None
    return {"x": x, "taps": taps, "segment_ids": segment_ids}, [dy, d_state]


@pytest.mark.parametrize("name", SHORT_CONV)
def test_short_conv_equals_reference(name):
    case = SHORT_CONV[name]
    inputs, cotangents = _conv_inputs(case)
    errors = compare(
        lambda **a: short_conv(**a, activation=case.activation, impl="pallas_gpu"),
        lambda **a: short_conv(**a, activation=case.activation, impl="ref"),
        inputs, cotangents=cotangents,
    )  # fmt: skip
    assert_close(errors, {"float32": 1e-6, "bfloat16": 4e-3}[case.dtype])


def test_other_documents_of_short_conv_may_hold_nan():
    inputs, (dy, _) = _conv_inputs(SHORT_CONV["packed"])
    segment_ids = inputs["segment_ids"]
    padding = segment_ids[0] == 0

    @jax.jit
    def value_and_grads(x, dy):
        def conv(x, taps):
            return short_conv(x, taps, segment_ids=segment_ids, impl="pallas_gpu")[0]

        y, pullback = jax.vjp(conv, x, inputs["taps"])
        return y, pullback(dy)[0]

    clean = value_and_grads(inputs["x"], dy)
    poisoned = value_and_grads(inputs["x"].at[:, padding].set(jnp.nan), dy)
    for a, b in zip(clean, poisoned, strict=True):
        np.testing.assert_array_equal(a[:, ~padding], b[:, ~padding])


def test_short_conv_refuses_an_initial_state():
    inputs, (_, state) = _conv_inputs(SHORT_CONV["packed"])
    with pytest.raises(NotImplementedError, match="first position"):
        short_conv(**inputs, initial_state=state, impl="pallas_gpu")
