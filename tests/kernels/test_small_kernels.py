"""Kernels of attn_res and gated_norm for GPUs and TPUs, interpreted, against the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res
from pallas_kernels.attn_res import specs as attn_res_specs
from pallas_kernels.testing import assert_close, compare

EPS = 1e-5
KERNELS = ("pallas_gpu", "pallas_tpu")
# programs that are full, and one that is not
ATTN_RES = attn_res_specs.CASES | {
    "long": attn_res_specs.Case(num_sources=9, used=8, batch=1, length=257, width=16),
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
