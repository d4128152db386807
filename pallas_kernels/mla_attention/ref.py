"""Meaning of mla_attention: the dense softmax, written out."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import NO_KEY_LSE, accum_dtype, visible
from pallas_kernels.padding import without_padding


def _logits(q, k, segment_ids, kv_segment_ids, q_offset, scale, causal, indices=None):
    """Scores [B, N, T, S] and which of them count [B, 1, T, S]."""
    dtype = accum_dtype(q)
    pos_q_T = q_offset + jnp.arange(q.shape[1])
    mask_BTS = visible(segment_ids, kv_segment_ids, pos_q_T, jnp.arange(k.shape[1]), causal)
    if indices is not None:
        mask_BTS &= (indices[..., None] == jnp.arange(k.shape[1])).any(2)
    s_BNTS = scale * jnp.einsum("BTNH,BSNH->BNTS", q.astype(dtype), k.astype(dtype))
    return s_BNTS, mask_BTS[:, None]


def mla_attention(q, k, v, segment_ids, kv_segment_ids, q_offset, indices, *, scale, causal):
    """Materialises every score; differentiable by autodiff, through the output and the lse."""
    # a weight of 0 does not keep a NaN of padding out of a product
    (q,), (k, v) = without_padding(segment_ids, q), without_padding(kv_segment_ids, k, v)
    s_BNTS, mask = _logits(q, k, segment_ids, kv_segment_ids, q_offset, scale, causal, indices)
    top = jnp.max(jnp.where(mask, s_BNTS, -jnp.inf), axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, s_BNTS - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    seen = total > 0
    safe = jnp.where(seen, total, 1)
    out_BTNh = jnp.einsum("BNTS,BSNh->BTNh", weights / safe, v.astype(weights.dtype))
    lse_BNT1 = jnp.where(seen, top + jnp.log(safe), NO_KEY_LSE)
    return without_padding(segment_ids, out_BTNh)[0], jnp.swapaxes(lse_BNT1[..., 0], 1, 2)


def max_logit(q, k, segment_ids, *, scale):
    """Largest visible score of each head, over batch and positions."""
    q, k = lax.stop_gradient((q, k))
    s_BNTS, mask = _logits(q, k, segment_ids, segment_ids, 0, scale, True)
    return jnp.max(jnp.where(mask, s_BNTS, -jnp.inf), axis=(0, 2, 3))
