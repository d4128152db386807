"""Meaning of lightning_indexer: all scores, then a stable sort."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import accum_dtype, visible
from pallas_kernels.lightning_indexer.choice import by_position
from pallas_kernels.lightning_indexer.scores import ranked


def lightning_indexer(q_idx, k_idx, w_idx, seg_q, seg_k, q_offset, *, top_k, order, approx_recall):
    """Indices [B, T, top_k] and their scores, -1 and -inf past the visible keys."""
    if approx_recall is not None:
        raise NotImplementedError("the reference chooses exactly")
    inputs = lax.stop_gradient((q_idx, k_idx, w_idx))
    q_BTUu, k_BSu, w_BTU = (x.astype(accum_dtype(x)) for x in inputs)
    U, u = q_BTUu.shape[2:]
    dots_BTUS = jax.nn.relu(jnp.einsum("BTUu,BSu->BTUS", q_BTUu, k_BSu))
    w_BTU = w_BTU.astype(dots_BTUS.dtype) * U**-0.5 * u**-0.5
    scores_BTS = jnp.einsum("BTU,BTUS->BTS", w_BTU, dots_BTUS)
    T, S = q_BTUu.shape[1], k_BSu.shape[1]
    mask_BTS = visible(seg_q, seg_k, q_offset + jnp.arange(T), jnp.arange(S))
    scores_BTS = ranked(scores_BTS, mask_BTS)
    order_BTS = jnp.argsort(-scores_BTS, axis=-1, stable=True)
    extra = max(0, top_k - S)
    chosen = jnp.pad(order_BTS, ((0, 0), (0, 0), (0, extra)))[..., :top_k]
    rank_J = jnp.arange(top_k)
    taken = rank_J < mask_BTS.sum(-1, keepdims=True)
    values = jnp.where(taken, jnp.take_along_axis(scores_BTS, chosen, axis=-1), -jnp.inf)
    indices = jnp.where(taken, chosen, -1).astype(jnp.int32)
    return by_position(indices, values) if order == "position" else (indices, values)
