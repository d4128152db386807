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
        return -rate * _softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


def write_strength(beta_logits):
    """sigmoid in float32."""
    return jax.nn.sigmoid(beta_logits.astype(sum_dtype(beta_logits)))


@jax.custom_jvp
def _softplus(x):
    """log(1 + e^x) to a rounding or two at any x; XLA's log1p takes 4 times as long on CPU.

    With u = e^-|x| and z = u / (2 + u), at most 1/3, log(1 + u) = 2 atanh z is a series in z^2.
    """
    u = jnp.exp(-jnp.abs(x))
    z = u / (2 + u)
    terms = 8 if x.dtype == jnp.float32 else 17
    series = jnp.zeros_like(z)
    for n in reversed(range(terms)):
        series = series * (z * z) + 1 / (2 * n + 1)
    return jnp.maximum(x, 0) + 2 * z * series


@_softplus.defjvp
def _softplus_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    return _softplus(x), jax.nn.sigmoid(x) * dx
