"""Attention Residuals: what a sublayer reads is a mix over depth (architecture section 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.layers.param import use, vector, wide
from moejax.partitioning import batch_local
from pallas_kernels.attn_res import attn_res


class AttnRes(nnx.Module):
    """Learned attention over each token's residual sources.

    Starts as their plain mean (query 0).
    """

    def __init__(self, dim: int, eps: float):
        self.eps = eps
        self.query = vector(jnp.zeros(dim), (None,))
        self.norm = vector(jnp.ones(dim), (None,))

    def __call__(self, sources_XBTD: jax.Array, num_sources: jax.Array | int) -> jax.Array:
        """Mix [B, T, D] of the first `num_sources` sources."""
        full = wide(sources_XBTD.dtype)
        mix = batch_local(self._mix, (1,))
        return mix(
            sources_XBTD,
            jnp.asarray(num_sources, jnp.int32),
            use(self.query, full),
            use(self.norm, full),
        )

    def _mix(self, sources_XBTD, num_sources, query_D, norm_D):
        return attn_res(query_D, norm_D, sources_XBTD, num_sources=num_sources, eps=self.eps)
