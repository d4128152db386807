"""lightning_indexer on GPUs: scores of some queries, then their exact top-J, block by block."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import pad_dim1, scan_queries
from pallas_kernels.lightning_indexer.choice import choose_keys
from pallas_kernels.lightning_indexer.pallas_gpu_scores import (
    block_scores,
    power_of_two,
    round_up,
)
from pallas_kernels.lightning_indexer.pallas_gpu_select import can_select, select
from pallas_kernels.lightning_indexer.tiles import Tiles, tiles_for


def lightning_indexer(q_idx, k_idx, w_idx, seg_q, seg_k, q_offset, *, top_k, order, approx_recall):
    """See api.py. Scores of at most `Tiles.block_bytes` exist at a time."""
    if q_idx.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{q_idx.dtype} has no kernel")
    if approx_recall is not None:
        raise NotImplementedError("the kernel chooses exactly; on a GPU nothing else is faster")
    if 0 in q_idx.shape or 0 in k_idx.shape:
        raise NotImplementedError("an empty array needs no kernel")
    q_idx, k_idx, w_idx = lax.stop_gradient((q_idx, k_idx, w_idx))
    B, S, u = k_idx.shape
    tiles = tiles_for(u, k_idx.dtype.itemsize)
    length = padded_keys(S, tiles)
    k_idx, seg_k = pad_dim1(k_idx, length), pad_dim1(seg_k, length)
    kept = min(top_k, S)
    fill = [(0, 0), (0, 0), (0, top_k - kept)]

    def query_block(carry, start, blocks):
        q_BtUu, w_BtU, seg_Bt = blocks
        scores_BtS = block_scores(q_BtUu, k_idx, w_BtU, seg_Bt, seg_k, q_offset + start, tiles)
        indices, scores = top_keys(scores_BtS, kept, order, tiles)
        indices = jnp.pad(indices, fill, constant_values=-1)
        return carry, (indices, jnp.pad(scores, fill, constant_values=-jnp.inf))

    limit = block_limit(B, length, tiles)
    return scan_queries(query_block, None, (q_idx, w_idx, seg_q), limit)[1]


def padded_keys(num_keys: int, tiles: Tiles) -> int:
    """Keys in whole parts of what one program selects from, and in whole tiles of scores."""
    part = min(tiles.select, power_of_two(num_keys, tiles.key))
    return round_up(num_keys, part)


def block_limit(batch: int, num_keys: int, tiles: Tiles) -> int:
    """Queries of a sequence that are scored at once: a power of two, as lengths of rows often are.

    Other blocks would leave a last one to be filled up, by a copy of all queries.
    """
    fewest, most = tiles.block_queries
    queries = max(min(tiles.block_bytes // (4 * num_keys), most), fewest) // batch
    return max(tiles.query, 1 << (max(queries, 1).bit_length() - 1))


def top_keys(scores_BtS, top_k, order, tiles):
    """Indices and scores [B, t, J] of the largest of [B, t, S]; -1 where the score is -inf."""
    if not can_select(scores_BtS.shape[2], top_k, tiles):
        return choose_keys(scores_BtS, top_k, order, None)
    rows_RS = scores_BtS.reshape(-1, scores_BtS.shape[2])
    indices_RJ, scores_RJ = select(rows_RS, top_k, tiles)
    if order == "score":
        # a stable sort of rising positions: the lower one stays first
        negated, indices_RJ = lax.sort((-scores_RJ, indices_RJ), num_keys=1, is_stable=True)
        scores_RJ = 0 - negated  # the negation of 0.0 is not 0.0
    shape = (*scores_BtS.shape[:2], top_k)
    return indices_RJ.reshape(shape), scores_RJ.reshape(shape)
