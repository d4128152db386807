"""RMSNorm and LayerNorm, statistics in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.layers.param import use, vector, wide
from moejax.typing import Array, Float


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float
) -> Float[Array, "*B D"]:
    """``x / sqrt(mean(x²) + eps)``, cast to x's dtype, then times the weight.

    That order is the released models'.
    """
    x_wide = x.astype(wide(x.dtype))
    scale = lax.rsqrt(jnp.mean(jnp.square(x_wide), -1, keepdims=True) + eps)
    return (x_wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Mean-free RMSNorm with weight and bias, all in float32 (the lightning indexer's key norm)."""
    x_wide = x.astype(wide(x.dtype))
    centred = x_wide - jnp.mean(x_wide, -1, keepdims=True)
    normed = centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps)
    return (normed * weight + bias).astype(x.dtype)


class RmsNorm(nnx.Module):
    """RMSNorm with a learned weight over the last dim."""

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.weight = vector(jnp.ones(dim), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, use(self.weight, x.dtype), self.eps)
