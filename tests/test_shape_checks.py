"""The import hook is on: a wrong shape or dtype fails at the call, and the right ones pass."""

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

from pallas_kernels.permute import plan_permute, unpermute

pytestmark = pytest.mark.quick

PLAN = plan_permute(jnp.array([[0, 1], [1, 0], [1, 1]]), 2)  # 3 tokens, 2 experts each


def _combine(rows_shape: tuple[int, ...], weights_dtype: jnp.dtype) -> jax.Array:
    return unpermute(jnp.ones(rows_shape), jnp.ones((3, 2), weights_dtype), PLAN)


def test_right_shapes_pass():
    assert _combine((6, 4), jnp.float32).shape == (3, 4)


@pytest.mark.parametrize(
    ("rows_shape", "weights_dtype"), [((6, 4, 1), jnp.float32), ((6, 4), jnp.int32)]
)
def test_wrong_shape_or_dtype_is_named(rows_shape, weights_dtype):
    with pytest.raises(jaxtyping.TypeCheckError, match="unpermute"):
        _combine(rows_shape, weights_dtype)
    with pytest.raises(jaxtyping.TypeCheckError, match="unpermute"):  # while tracing, too
        jax.eval_shape(lambda: _combine(rows_shape, weights_dtype))


def test_eight_cpu_devices():
    assert len(jax.devices("cpu")) == 8
