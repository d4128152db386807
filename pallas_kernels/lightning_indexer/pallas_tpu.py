"""lightning_indexer on TPUs: a tiled product with all heads inside; XLA chooses from its scores.

A tile has keys down and queries across, so that a head's weights of its queries are a row, as those
lie in memory; it is turned once, when all heads are in.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.blocks import pad_dim1, scan_queries
from pallas_kernels.lightning_indexer.choice import choose_keys
from pallas_kernels.lightning_indexer.scores import ranked, weight_factor
from pallas_kernels.lightning_indexer.tiles import tpu_tile_for

# Scores [block, S] that exist at a time. XLA sorts them, which takes twice as much again.
_BLOCK_BYTES = 64 << 20
_FEWEST = 8


def lightning_indexer(q_idx, k_idx, w_idx, seg_q, seg_k, q_offset, *, top_k, order, approx_recall):
    """See api.py."""
    if q_idx.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{q_idx.dtype} has no kernel")
    if 0 in q_idx.shape or 0 in k_idx.shape:
        raise NotImplementedError("an empty array needs no kernel")
    if q_idx.shape[1] < _FEWEST:
        raise NotImplementedError(f"fewer than {_FEWEST} queries would leave a tile empty")
    q_idx, k_idx, w_idx = lax.stop_gradient((q_idx, k_idx, w_idx))
    B, S, _ = k_idx.shape
    kept = min(top_k, S)
    fill = [(0, 0), (0, 0), (0, top_k - kept)]

    def query_block(carry, start, blocks):
        q_BtUu, w_BtU, seg_Bt = blocks
        scores_BtS = block_scores(q_BtUu, k_idx, w_BtU, seg_Bt, seg_k, q_offset + start)
        indices, scores = choose_keys(scores_BtS, kept, order, approx_recall)
        indices = jnp.pad(indices, fill, constant_values=-1)
        return carry, (indices, jnp.pad(scores, fill, constant_values=-jnp.inf))

    tile = tpu_tile_for(S)
    queries = max(1, min(_BLOCK_BYTES // (4 * B * S), 1024))
    limit = max(tile.queries, 1 << (queries.bit_length() - 1))
    return scan_queries(query_block, None, (q_idx, w_idx, seg_q), limit)[1]


def block_scores(
    q_BtUu: jax.Array, k_BSu: jax.Array, w_BtU: jax.Array, seg_Bt: jax.Array, seg_BS: jax.Array,
    first: jax.Array,
) -> jax.Array:  # fmt: skip
    """Scores [B, t, S] in float32, as `ranked` makes them; the first query is at key `first`."""
    (B, t, U, u), S = q_BtUu.shape, k_BSu.shape[1]
    tile = tpu_tile_for(S)
    queries, keys = pl.cdiv(t, tile.queries), pl.cdiv(S, tile.keys)
    lengthen_q = lambda x: pad_dim1(x, queries * tile.queries)  # noqa: E731
    lengthen_k = lambda x: pad_dim1(x, keys * tile.keys)  # noqa: E731
    w_BtU = w_BtU.astype(jnp.float32) * weight_factor(U, u)
    given = (
        jnp.asarray(first, jnp.int32).reshape(1), lengthen_q(q_BtUu).swapaxes(1, 2),
        lengthen_k(k_BSu), lengthen_q(w_BtU).swapaxes(1, 2), lengthen_q(seg_Bt)[:, None],
        lengthen_k(seg_BS)[:, None],
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((B, queries * tile.queries, keys * tile.keys), jnp.float32)
    scores_BtS = _tpu.call(
        functools.partial(_body, tile, U), name="index_scores", grid=(B, queries, keys),
        in_specs=[
            pl.BlockSpec((None, U, tile.queries, u), lambda b, i, j, _: (b, 0, i, 0)),
            pl.BlockSpec((None, tile.keys, u), lambda b, i, j, _: (b, j, 0)),
            pl.BlockSpec((None, U, tile.queries), lambda b, i, j, _: (b, 0, i)),
            pl.BlockSpec((None, 1, tile.queries), lambda b, i, j, _: (b, 0, i)),
            pl.BlockSpec((None, 1, tile.keys), lambda b, i, j, _: (b, 0, j)),
        ],
        out_specs=pl.BlockSpec((None, tile.queries, tile.keys), lambda b, i, j, _: (b, i, j)),
        out_shape=out, parallel=3, num_prefetch=1, vmem_bytes=48 << 20,
    )(*given)  # fmt: skip
    return scores_BtS[:, :t, :S]


def _body(tile, num_heads, first_ref, q_ref, k_ref, w_ref, seg_q_ref, seg_k_ref, out_ref):
    query = first_ref[0] + pl.program_id(1) * tile.queries
    key = pl.program_id(2) * tile.keys
    shape = (tile.queries, tile.keys)

    def head(j, scores_st):
        dots_st = _tpu.dot(k_ref[...], q_ref[j], trans_b=True, exact=True)
        return scores_st + w_ref[pl.ds(j, 1), :] * jnp.maximum(dots_st, 0)

    def visible_ts():
        seg_q_st = jnp.broadcast_to(seg_q_ref[...], shape[::-1])
        seg_q_ts, seg_k_ts = seg_q_st.T, jnp.broadcast_to(seg_k_ref[...], shape)
        pos_q = query + lax.broadcasted_iota(jnp.int32, shape, 0)
        pos_k = key + lax.broadcasted_iota(jnp.int32, shape, 1)
        return (seg_q_ts == seg_k_ts) & (seg_q_ts > 0) & (pos_k <= pos_q)

    below = key < query + tile.queries

    @pl.when(below)
    def _():
        scores_st = lax.fori_loop(0, num_heads, head, jnp.zeros(shape[::-1], jnp.float32))
        out_ref[...] = ranked(scores_st.T, visible_ts())

    @pl.when(jnp.logical_not(below))
    def _():
        out_ref[...] = jnp.full(shape, -jnp.inf, jnp.float32)
