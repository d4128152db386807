"""lightning_indexer over blocks of queries: [block, S] scores at a time, never [T, S]."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import accum_dtype, limit_by_bytes, scan_queries, visible
from pallas_kernels.lightning_indexer.choice import choose_keys
from pallas_kernels.lightning_indexer.scores import ranked, scores_by_head

QUERY_BLOCK = 128
# Bytes of a sequence's scores [block, S]; some three of them exist at a time.
BUDGET = 16 << 20


def lightning_indexer(q_idx, k_idx, w_idx, seg_q, seg_k, q_offset, *, top_k, order, approx_recall):
    """See api.py: a full top-k of every row."""
    q_idx, k_idx, w_idx = lax.stop_gradient((q_idx, k_idx, w_idx))
    S = k_idx.shape[1]
    pos_S = jnp.arange(S, dtype=jnp.int32)
    kept = min(top_k, S)
    fill = [(0, 0), (0, 0), (0, top_k - kept)]

    def query_block(carry, start, blocks):
        q_BtUu, w_BtU, seg_Bt = blocks
        pos_t = q_offset + start + jnp.arange(seg_Bt.shape[1], dtype=jnp.int32)
        scores_BtS = scores_by_head(q_BtUu, k_idx, w_BtU)
        scores_BtS = ranked(scores_BtS, visible(seg_Bt, seg_k, pos_t, pos_S))
        indices, values = choose_keys(scores_BtS, kept, order, approx_recall)
        indices = jnp.pad(indices, fill, constant_values=-1)
        return carry, (indices, jnp.pad(values, fill, constant_values=-jnp.inf))

    limit = limit_by_bytes(accum_dtype(q_idx).itemsize * S, BUDGET, QUERY_BLOCK)
    return scan_queries(query_block, None, (q_idx, w_idx, seg_q), limit)[1]
