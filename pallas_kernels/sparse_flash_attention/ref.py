"""Meaning of sparse_flash_attention: dense absorbed attention under the mask of chosen keys."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import NO_KEY_LSE, accum_dtype
from pallas_kernels.padding import without_padding


def _logits(q_latent, q_rope, latent, k_rope, indices, scale):
    """Scores [B, N, T, S], the mask of chosen keys [B, 1, T, S], and the latent, in float32."""
    dtype = accum_dtype(q_latent)
    q_latent, q_rope, latent, k_rope = (x.astype(dtype) for x in (q_latent, q_rope, latent, k_rope))
    mask_BTS = (indices[..., None] == jnp.arange(latent.shape[1])).any(2)
    # a weight of 0 does not keep a NaN out of a product: rows nobody chose, queries without a key
    latent, k_rope = without_padding(mask_BTS.any(1), latent, k_rope)
    q_latent, q_rope = without_padding(mask_BTS.any(2), q_latent, q_rope)
    s_BNTS = jnp.einsum("BTNC,BSC->BNTS", q_latent, latent)
    s_BNTS = scale * (s_BNTS + jnp.einsum("BTNR,BSR->BNTS", q_rope, k_rope))
    return s_BNTS, mask_BTS[:, None], latent


def sparse_flash_attention(q_latent, q_rope, latent, k_rope, indices, *, scale, deterministic):
    """Materialises every score, so it is always deterministic; differentiable by autodiff."""
    s_BNTS, mask, latent_BSC = _logits(q_latent, q_rope, latent, k_rope, indices, scale)
    top = jnp.max(jnp.where(mask, s_BNTS, -jnp.inf), axis=-1, keepdims=True)
    top = lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, s_BNTS - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    safe = jnp.where(total > 0, total, 1)
    out_BTNC = jnp.einsum("BNTS,BSC->BTNC", weights / safe, latent_BSC)
    lse_BNT1 = jnp.where(total > 0, top + jnp.log(safe), NO_KEY_LSE)
    return out_BTNC, jnp.swapaxes(lse_BNT1[..., 0], 1, 2)


def sparse_max_logit(q_latent, q_rope, latent, k_rope, indices, *, scale):
    """Largest chosen score of each head, over batch and positions."""
    args = lax.stop_gradient((q_latent, q_rope, latent, k_rope))
    s_BNTS, mask, _ = _logits(*args, indices, scale)
    return jnp.max(jnp.where(mask, s_BNTS, -jnp.inf), axis=(0, 2, 3))
