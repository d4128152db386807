"""mla_attention for TPUs, in Pallas' interpreter: values, gradients, borders, poisoned padding."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.mla_attention import mla_attention, specs
from pallas_kernels.testing import assert_close
from tests.kernels.attention_errors import TOLERANCE, errors, poisoned_padding

# tiles have 128 positions or more: the longer cases have several
DEFAULT = [("later_queries", "bfloat16"), ("chosen", "float32")]
RUNS = [(name, "float32") for name in specs.KERNEL_CASES] + [("later_queries", "bfloat16")]
LONG = specs.Case(1, 1025, 1025, 1, 16, 16, starts=(600, 1000), padding=3)
SLOW = [pytest.param(*run, marks=pytest.mark.slow) for run in RUNS if run not in DEFAULT]
SLOW += [pytest.param("long", "float32", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "dtype"), [*DEFAULT, *SLOW])
def test_values_and_gradients_equal_reference(name, dtype):
    case = (specs.KERNEL_CASES | {"long": LONG})[name]
    clean = {name: x for name, x in case.inputs(jnp.dtype(dtype)).items() if x is not None}
    kernel, ref = (
        functools.partial(mla_attention, impl=impl, **case.options())
        for impl in ("pallas_tpu", "ref")
    )
    assert_close(errors(kernel, ref, poisoned_padding(clean), clean), TOLERANCE[dtype])


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64 has no kernel"):
        wide = jnp.zeros((1, 4, 2, 16), jnp.float64)
        mla_attention(wide, wide, wide, scale=1.0, impl="pallas_tpu")
