"""Meaning of indexer_kl: both distributions over all keys, written out."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import accum_dtype, visible
from pallas_kernels.padding import without_padding


def indexer_kl(
    q_idx, k_idx, w_idx, q_latent, q_rope, latent, k_rope, lse, indices, places, *, scale
):
    """KL [B, T]; differentiable by autodiff in the indexer's three inputs."""
    T, S = q_idx.shape[1], k_idx.shape[1]
    seg_q, seg_k, q_offset = places
    if indices is None:
        mask_BTS = visible(seg_q, seg_k, q_offset + jnp.arange(T), jnp.arange(S))
    else:
        chosen_BTS = (indices[..., None] == jnp.arange(S)).any(2)
        mask_BTS = chosen_BTS & (seg_q > 0)[..., None]
    # a weight of 0 does not keep a NaN out of a product: neither of padding nor of unseen keys
    q_idx, w_idx, q_latent, q_rope, lse = without_padding(
        seg_q, q_idx, w_idx, q_latent, q_rope, lse
    )
    k_idx, latent, k_rope = without_padding(mask_BTS.any(1), k_idx, latent, k_rope)
    main = lax.stop_gradient((q_latent, q_rope, latent, k_rope, lse))
    p_BTS = _target(*main, mask_BTS, scale)
    log_rho_BTS = _log_softmax(_scores(q_idx, k_idx, w_idx), mask_BTS)
    log_p_BTS = jnp.log(jnp.where(p_BTS > 0, p_BTS, 1))
    kl_BT = jnp.sum(p_BTS * (log_p_BTS - log_rho_BTS), axis=-1)
    return without_padding(seg_q, kl_BT)[0]


def _target(q_latent, q_rope, latent, k_rope, lse, mask_BTS, scale):
    dtype = accum_dtype(lse)
    q_latent, q_rope, latent, k_rope = (x.astype(dtype) for x in (q_latent, q_rope, latent, k_rope))
    z_BTNS = jnp.einsum("BTNC,BSC->BTNS", q_latent, latent)
    z_BTNS = scale * (z_BTNS + jnp.einsum("BTNR,BSR->BTNS", q_rope, k_rope)) - lse[..., None]
    summed_BTS = jnp.where(mask_BTS[:, :, None], jnp.exp(z_BTNS), 0).sum(2)
    total = summed_BTS.sum(-1, keepdims=True)
    # A single key has probability 1 by definition, whatever the rounding of lse and quotient.
    single = mask_BTS.sum(-1, keepdims=True) == 1
    normalised = summed_BTS / jnp.where(total > 0, total, 1)
    return jnp.where(single, mask_BTS.astype(dtype), normalised)


def _scores(q_idx, k_idx, w_idx):
    dtype = accum_dtype(q_idx)
    U, u = q_idx.shape[2:]
    dots_BTUS = jnp.einsum("BTUu,BSu->BTUS", q_idx.astype(dtype), k_idx.astype(dtype))
    w_BTU = w_idx.astype(dtype) * U**-0.5 * u**-0.5
    return jnp.einsum("BTU,BTUS->BTS", w_BTU, jax.nn.relu(dots_BTUS))


def _log_softmax(scores_BTS, mask_BTS):
    """Log-softmax over the mask; 0 outside it."""
    top = jnp.max(jnp.where(mask_BTS, scores_BTS, -jnp.inf), axis=-1, keepdims=True)
    shifted = jnp.where(mask_BTS, scores_BTS - lax.stop_gradient(top), 0)
    total = jnp.where(mask_BTS, jnp.exp(shifted), 0).sum(-1, keepdims=True)
    return jnp.where(mask_BTS, shifted - jnp.log(jnp.where(total > 0, total, 1)), 0)
