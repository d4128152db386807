"""indexer_kl on TPUs, the dense stage: tiles of queries and keys, by blocks of queries.

The sparse stage is refused: these chips fetch rows of 16 bits in eights, not one by one.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu
from pallas_kernels.blocks import pad_dim1
from pallas_kernels.indexer_kl import blockwise
from pallas_kernels.lightning_indexer import pallas_tpu as index_tpu
from pallas_kernels.lightning_indexer.scores import weight_factor
from pallas_kernels.lightning_indexer.tiles import tpu_tile_for

# Bytes of [block, S] in float32; some four of them exist at a time.
_BLOCK_BYTES = 16 << 20
_VMEM_BYTES = 48 << 20


def indexer_kl(
    q_idx, k_idx, w_idx, q_latent, q_rope, latent, k_rope, lse, indices, places, *, scale
):
    """See api.py."""
    if indices is not None:
        raise NotImplementedError("chosen rows of 16 bits cannot be fetched one by one")
    for x in (q_idx, latent):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"{x.dtype} has no kernel")
    if 0 in (*q_idx.shape, *q_latent.shape):
        raise NotImplementedError("an empty array needs no kernel")
    # parts of width 0 take no product
    parts = [(q, rows) for q, rows in ((q_latent, latent), (q_rope, k_rope)) if rows.shape[-1]]
    main: Any = tuple(zip(*parts, strict=True))
    main, lse = lax.stop_gradient((main, lse.astype(jnp.float32)))
    return blockwise.kl(_kernels(float(scale)), (q_idx, k_idx, w_idx), main, lse, None, places)


@functools.cache  # one object for the same settings, so that JAX traces once
def _kernels(scale: float) -> blockwise.Kernels:
    return blockwise.Kernels(functools.partial(_target, scale=scale), _scores, _gradients, _limit)


def _limit(batch: int, num_keys: int, chosen: bool) -> int:
    queries = max(1, min(_BLOCK_BYTES // (4 * batch * num_keys), 1024))
    return max(tpu_tile_for(num_keys).queries, 1 << (queries.bit_length() - 1))


def _scores(keys, q_BtUu, k_BSu, w_BtU):
    return index_tpu.block_scores(q_BtUu, k_BSu, w_BtU, keys.seg_Bt, keys.seg_BS, keys.start)


class _Tiles:
    """Sizes of a block in whole tiles, and which part of an array a step has."""

    def __init__(self, num_queries, num_keys):
        self.tile = tpu_tile_for(num_keys)
        self.query_tiles = pl.cdiv(num_queries, self.tile.queries)
        self.key_tiles = pl.cdiv(num_keys, self.tile.keys)
        self.queries = self.query_tiles * self.tile.queries
        self.keys = self.key_tiles * self.tile.keys

    def sees(self, first_ref, i, j):
        """Whether query tile i can see something of key tile j."""
        return j * self.tile.keys < first_ref[0] + (i + 1) * self.tile.queries


def _target(keys, queries, rows, lse_BtN, *, scale):
    """sum_n exp(z - lse) [B, t, S]; 0 in tiles above the diagonal."""
    (B, t, N), S = lse_BtN.shape, rows[0].shape[1]
    tiles = _Tiles(t, S)
    tq, tk = tiles.tile
    given = (
        keys.start.reshape(1), pad_dim1(lse_BtN, tiles.queries).swapaxes(1, 2)[:, :, None],
        *(pad_dim1(x, tiles.queries).swapaxes(1, 2) for x in queries),
        *(pad_dim1(x, tiles.keys) for x in rows),
    )  # fmt: skip
    of_q = lambda K: pl.BlockSpec((None, None, tq, K), lambda b, i, j, n, _: (b, n, i, 0))  # noqa: E731
    of_rows = lambda K: pl.BlockSpec((None, tk, K), lambda b, i, j, n, _: (b, j, 0))  # noqa: E731
    summed_BtS = _tpu.call(
        functools.partial(_target_body, tiles, scale, N), name="indexer_kl_dense_target",
        grid=(B, tiles.query_tiles, tiles.key_tiles, N),
        in_specs=[
            pl.BlockSpec((None, None, 1, tq), lambda b, i, j, n, _: (b, n, 0, i)),
            *(of_q(x.shape[-1]) for x in queries), *(of_rows(x.shape[-1]) for x in rows),
        ],
        out_specs=pl.BlockSpec((None, tq, tk), lambda b, i, j, n, _: (b, i, j)),
        out_shape=jax.ShapeDtypeStruct((B, tiles.queries, tiles.keys), jnp.float32),
        scratch=[pltpu.VMEM((tk, tq), jnp.float32)], parallel=3, num_prefetch=1,
        vmem_bytes=_VMEM_BYTES,
    )(*given)  # fmt: skip
    return summed_BtS[:, :t, :S]


def _target_body(tiles, scale, num_heads, first_ref, lse_ref, *refs):
    *parts, out_ref, summed_ref = refs
    q_refs, rows_refs = parts[: len(parts) // 2], parts[len(parts) // 2 :]
    i, j, n = (pl.program_id(axis) for axis in (1, 2, 3))

    @pl.when(n == 0)
    def _():
        summed_ref[...] = jnp.zeros_like(summed_ref)

    @pl.when(tiles.sees(first_ref, i, j))
    def _():
        z_st = sum(
            _tpu.dot(rows_ref[...], q_ref[...], trans_b=True, exact=True)
            for q_ref, rows_ref in zip(q_refs, rows_refs, strict=True)
        )
        summed_ref[...] += jnp.exp(scale * z_st - lse_ref[...])

    @pl.when(n == num_heads - 1)
    def _():
        out_ref[...] = summed_ref[...].T


def _gradients(keys, q_BtUu, k_BSu, w_BtU, dscores_BtS, dk_BSu):
    """(dq, dk, dw) in float32; a head's dw is the product of its q and of dq without w."""
    (_, t, U, u), S = q_BtUu.shape, k_BSu.shape[1]
    factor, low = weight_factor(U, u), q_BtUu.dtype
    tiles = _Tiles(t, S)
    # what no key or no query of the set is, becomes 0: then products with it are 0 too
    seen_Bt = keys.seg_Bt > 0
    q_BtUu = jnp.where(seen_Bt[..., None, None], q_BtUu, 0)
    k = pad_dim1(jnp.where((keys.seg_BS > 0)[..., None], k_BSu, 0), tiles.keys)
    w_BtU1 = jnp.where(seen_Bt[..., None], factor * w_BtU.astype(jnp.float32), 0)[..., None]
    by_head = lambda x: pad_dim1(x, tiles.queries).swapaxes(1, 2)  # noqa: E731
    padding = ((0, 0), (0, tiles.queries - t), (0, tiles.keys - S))
    given = (keys.start.reshape(1), by_head(q_BtUu), k, jnp.pad(dscores_BtS, padding))
    bare_BtUu = _dq(tiles, given).swapaxes(1, 2)[:, :t]
    weighted = by_head((w_BtU1 * q_BtUu.astype(jnp.float32)).astype(low))
    dk_BSu += _dk(tiles, (*given, weighted))[:, :S]
    dw_BtU = factor * jnp.sum(bare_BtUu * q_BtUu.astype(jnp.float32), axis=-1)
    return w_BtU1 * bare_BtUu, dk_BSu, dw_BtU


def _dq(tiles, given):
    """sum_s dI [y > 0] k of each query and head, [B, U, t, u]."""
    B, U, _, u = given[1].shape
    tq, tk = tiles.tile
    return _tpu.call(
        functools.partial(_dq_body, tiles, U), name="indexer_kl_dense_dq",
        grid=(B, tiles.query_tiles, tiles.key_tiles),
        in_specs=[
            pl.BlockSpec((None, U, tq, u), lambda b, i, j, _: (b, 0, i, 0)),
            pl.BlockSpec((None, tk, u), lambda b, i, j, _: (b, j, 0)),
            pl.BlockSpec((None, tq, tk), lambda b, i, j, _: (b, i, j)),
        ],
        out_specs=pl.BlockSpec((None, U, tq, u), lambda b, i, j, _: (b, 0, i, 0)),
        out_shape=jax.ShapeDtypeStruct((B, U, tiles.queries, u), jnp.float32), parallel=2,
        num_prefetch=1, vmem_bytes=_VMEM_BYTES,
    )(*given)  # fmt: skip


def _dq_body(tiles, num_heads, first_ref, q_ref, k_ref, dscores_ref, dq_ref):
    i, j = pl.program_id(1), pl.program_id(2)

    @pl.when(j == 0)
    def _():
        dq_ref[...] = jnp.zeros_like(dq_ref)

    @pl.when(tiles.sees(first_ref, i, j))
    def _():
        def head(n, _):
            ds_ts = _of_positive(q_ref[n], k_ref[...], dscores_ref[...])
            dq_ref[n] += _tpu.dot(ds_ts, k_ref[...], exact=True)

        lax.fori_loop(0, num_heads, head, None)


def _of_positive(q_tu, k_su, dscores_ts):
    """dI where the head's product is positive, in the dtype of products."""
    dots_ts = _tpu.dot(q_tu, k_su, trans_b=True, exact=True)
    return jnp.where(dots_ts > 0, dscores_ts, 0).astype(q_tu.dtype)


def _dk(tiles, given):
    """sum_tj dI [y > 0] w q of each key, [B, S, u]; the last of `given` is w q."""
    B, U, _, u = given[1].shape
    tq, tk = tiles.tile
    heads = pl.BlockSpec((None, U, tq, u), lambda b, j, i, _: (b, 0, i, 0))
    return _tpu.call(
        functools.partial(_dk_body, tiles, U), name="indexer_kl_dense_dk",
        grid=(B, tiles.key_tiles, tiles.query_tiles),
        in_specs=[
            heads,
            pl.BlockSpec((None, tk, u), lambda b, j, i, _: (b, j, 0)),
            pl.BlockSpec((None, tq, tk), lambda b, j, i, _: (b, i, j)),
            heads,
        ],
        out_specs=pl.BlockSpec((None, tk, u), lambda b, j, i, _: (b, j, 0)),
        out_shape=jax.ShapeDtypeStruct((B, tiles.keys, u), jnp.float32), parallel=2,
        num_prefetch=1, vmem_bytes=_VMEM_BYTES,
    )(*given)  # fmt: skip


def _dk_body(tiles, num_heads, first_ref, q_ref, k_ref, dscores_ref, weighted_ref, dk_ref):
    j, i = pl.program_id(1), pl.program_id(2)

    @pl.when(i == 0)
    def _():
        dk_ref[...] = jnp.zeros_like(dk_ref)

    @pl.when(tiles.sees(first_ref, i, j))
    def _():
        def head(n, _):
            ds_ts = _of_positive(q_ref[n], k_ref[...], dscores_ref[...])
            dk_ref[...] += _tpu.dot(ds_ts, weighted_ref[n], trans_a=True, exact=True)

        lax.fori_loop(0, num_heads, head, None)
