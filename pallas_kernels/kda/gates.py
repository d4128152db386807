"""What stands before the recurrence: unit-length queries and keys, decay, write strength."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype


def unit_length(x):
    """x / sqrt(sum x^2 + 1e-6) over the last dim, summed in float32, in x's dtype."""
    wide = x.astype(sum_dtype(x))
    square = jnp.sum(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


def log_decay(gate_BTNH, a_log_N, dt_bias_NH, lower_bound):
    """Natural log of the decay, float32, with a = exp(a_log):

    softplus form, `lower_bound` None:  -a softplus(gate + dt_bias), without limit;
    bounded form:                       lower_bound sigmoid(a (gate + dt_bias)), above lower_bound.
    """
    dtype = sum_dtype(gate_BTNH)
    rate = jnp.exp(a_log_N.astype(dtype))[:, None]
    shifted = gate_BTNH.astype(dtype) + dt_bias_NH.astype(dtype)
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def write_strength(beta_logits):
    """sigmoid in float32."""
    return jax.nn.sigmoid(beta_logits.astype(sum_dtype(beta_logits)))
