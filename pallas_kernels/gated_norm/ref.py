"""Gated RMSNorm as its formula."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype


def gated_norm(x, gate, weight, *, eps):
    """`api.gated_norm`, differentiated by JAX."""
    dtype = sum_dtype(x, gate, weight)
    wide = x.astype(dtype)
    norm = wide / jnp.sqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (norm * weight.astype(dtype) * jax.nn.sigmoid(gate.astype(dtype))).astype(x.dtype)
