"""Kernels of attn_res and gated_norm for GPUs and TPUs, interpreted, against the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.attn_res import specs as attn_res_specs
from pallas_kernels.gated_norm import gated_norm
from pallas_kernels.gated_norm import specs as gated_norm_specs
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
