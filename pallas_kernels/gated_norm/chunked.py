"""Gated RMSNorm with its own gradient, which saves the inputs in their own dtype and no more."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype


def gated_norm(x, gate, weight, *, eps):
    """`api.gated_norm`."""
    return _gated_norm(float(eps), x, gate, weight)


def _parts(eps, x, gate, weight):
    """x over its root mean square, one over that, sigmoid(gate) and weight, in float32."""
    dtype = sum_dtype(x, gate, weight)
    wide = x.astype(dtype)
    inverse_rms = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide * inverse_rms, inverse_rms, jax.nn.sigmoid(gate.astype(dtype)), weight.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_norm(eps, x, gate, weight):
    norm, _, opening, wide_weight = _parts(eps, x, gate, weight)
    return (norm * wide_weight * opening).astype(x.dtype)


def _fwd(eps, x, gate, weight):
    return _gated_norm(eps, x, gate, weight), (x, gate, weight)


def _bwd(eps, residuals, dy):
    x, gate, weight = residuals
    norm, inverse_rms, opening, wide_weight = _parts(eps, x, gate, weight)
    dy = dy.astype(norm.dtype)
    d_norm = dy * wide_weight * opening
    dx = inverse_rms * (d_norm - norm * jnp.mean(d_norm * norm, axis=-1, keepdims=True))
    d_gate = d_norm * norm * (1 - opening)
    d_weight = jnp.sum(dy * norm * opening, axis=tuple(range(x.ndim - 1)))
    return dx.astype(x.dtype), d_gate.astype(gate.dtype), d_weight.astype(weight.dtype)


_gated_norm.defvjp(_fwd, _bwd)
