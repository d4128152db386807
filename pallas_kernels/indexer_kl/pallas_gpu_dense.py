"""Kernels of the dense stage: tiles of queries and keys, one head of a tile after the other."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.blocks import pad_dim1
from pallas_kernels.indexer_kl.tiles import Tile
from pallas_kernels.lightning_indexer.pallas_gpu_scores import (
    block_scores,
    padded_heads,
    round_up,
)
from pallas_kernels.lightning_indexer.scores import weight_factor
from pallas_kernels.lightning_indexer.tiles import tiles_for as index_tiles_for

_LOG2_E = 1.4426950408889634


def target(keys, queries, rows, lse_BtN, *, scale: float, tile: Tile) -> jax.Array:
    """sum_n exp(z - lse) [B, t, S]; tiles above the diagonal are not written."""
    B, t, N = lse_BtN.shape
    S = rows[0].shape[1]
    sizes = _Sizes.of(t, S, N, tile)
    given = [
        keys.start.reshape(1), pad_dim1(lse_BtN, sizes.queries).swapaxes(1, 2),
        *(pad_dim1(padded_heads(x), sizes.queries) for x in queries),
        *(pad_dim1(padded_heads(x), sizes.keys) for x in rows),
    ]  # fmt: skip
    out = jax.ShapeDtypeStruct((B, sizes.queries, sizes.keys), jnp.float32)
    return _call(
        functools.partial(_target_body, sizes, scale), "indexer_kl_dense_target",
        (B, sizes.query_tiles, sizes.key_tiles), given, out, tile,
    )[:, :t, :S]  # fmt: skip


def scores(keys, q_BtUu, k_BSu, w_BtU) -> jax.Array:
    """Index scores [B, t, S], -inf outside the set."""
    S, u = k_BSu.shape[1:]
    tiles = index_tiles_for(u, k_BSu.dtype.itemsize)
    length = round_up(S, tiles.key)
    k_BSu, seg_BS = pad_dim1(k_BSu, length), pad_dim1(keys.seg_BS, length)
    return block_scores(q_BtUu, k_BSu, w_BtU, keys.seg_Bt, seg_BS, keys.start, tiles)[..., :S]


def gradients(
    keys, q_BtUu, k_BSu, w_BtU, dscores_BtS, dk_BSu, *, tile_q: Tile, tile_k: Tile, programs: int
):
    """(dq, dk, dw) in float32; dk is `dk_BSu` and what these queries add to it.

    `dscores` is 0 outside the set, where q and k may hold anything.
    """
    B, t, U, u = q_BtUu.shape
    S = k_BSu.shape[1]
    factor = weight_factor(U, u)
    sizes = _Sizes.of(t, S, U, tile_q)
    assert (tile_q.rows, tile_q.keys) == (tile_k.rows, tile_k.keys)
    # what no key or no query of the set is, becomes 0: then products with it are 0 too
    seen_Bt, seen_BS = keys.seg_Bt > 0, keys.seg_BS > 0
    q = jnp.where(seen_Bt[..., None, None], q_BtUu, 0)
    k = jnp.where(seen_BS[..., None], k_BSu, 0)
    w = jnp.where(seen_Bt[..., None], w_BtU.astype(jnp.float32) * factor, 0)
    w = pad_dim1(w, sizes.queries).swapaxes(1, 2)
    dscores = jnp.pad(dscores_BtS, ((0, 0), (0, sizes.queries - t), (0, sizes.keys - S)))
    given = [
        keys.start.reshape(1), pad_dim1(padded_heads(q), sizes.queries),
        pad_dim1(padded_heads(k), sizes.keys), w, dscores,
    ]  # fmt: skip
    width = given[1].shape[-1]
    out = [
        jax.ShapeDtypeStruct((B, sizes.queries, U, width), jnp.float32),
        jax.ShapeDtypeStruct((B, U, sizes.queries), jnp.float32),
    ]
    dq, dw = _call(
        functools.partial(_dq_body, sizes), "indexer_kl_dense_dq", (B, sizes.query_tiles, U),
        given, out, tile_q,
    )  # fmt: skip
    groups = _groups(U, programs // max(1, B * sizes.key_tiles))
    parts = jax.ShapeDtypeStruct((B, groups, sizes.keys, width), jnp.float32)
    dk = _call(
        functools.partial(_dk_body, sizes), "indexer_kl_dense_dk", (B, groups, sizes.key_tiles),
        given, parts, tile_k,
    )  # fmt: skip
    dk_BSu += jnp.sum(dk, axis=1)[:, :S, :u]
    return dq[:, :t, :, :u], dk_BSu, factor * dw.swapaxes(1, 2)[:, :t]


def _groups(num_heads: int, wanted: int) -> int:
    """The smallest number of equal groups of heads that is at least `wanted`."""
    fits = (n for n in range(1, num_heads + 1) if num_heads % n == 0 and n >= wanted)
    return next(fits, num_heads)


class _Sizes(NamedTuple):
    """Queries and keys, in whole tiles; heads; and the tile."""

    queries: int
    keys: int
    num_heads: int
    rows: int
    columns: int

    @classmethod
    def of(cls, queries, keys, num_heads, tile):
        rows, columns = round_up(queries, tile.rows), round_up(keys, tile.keys)
        return cls(rows, columns, num_heads, tile.rows, tile.keys)

    @property
    def query_tiles(self) -> int:
        return self.queries // self.rows

    @property
    def key_tiles(self) -> int:
        return self.keys // self.columns

    def key_tiles_below(self, first, i):
        """Key tiles that query tile i can see something of."""
        return jnp.minimum((first + (i + 1) * self.rows - 1) // self.columns + 1, self.key_tiles)


def _call(body, name, grid, given, out, tile):
    whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,) * len(a.shape))  # noqa: E731
    return _gpu.call(
        body, name=name, grid=grid, in_specs=[whole(a) for a in given],
        out_specs=jax.tree.map(whole, out), out_shape=out, warps=tile.warps, stages=tile.stages,
    )(*given)  # fmt: skip


def _target_body(sizes, scale, first_ref, lse_ref, *refs):
    q_refs, row_refs, out_ref = refs[: len(refs) // 2], refs[len(refs) // 2 : -1], refs[-1]
    b, i, j = (pl.program_id(axis) for axis in range(3))
    rows, columns = pl.ds(i * sizes.rows, sizes.rows), pl.ds(j * sizes.columns, sizes.columns)
    k_sC = [_gpu.load(ref.at[b, columns, :]) for ref in row_refs]

    def head(n, summed_ts):
        z_ts = sum(
            _gpu.dot(_gpu.load(ref.at[b, rows, n, :]), k, trans_b=True, nearly_exact=True)
            for ref, k in zip(q_refs, k_sC, strict=True)
        )
        lse_t = _gpu.load(lse_ref.at[b, n, rows]) * _LOG2_E
        return summed_ts + jnp.exp2(z_ts * (scale * _LOG2_E) - lse_t[:, None])

    seen = j < sizes.key_tiles_below(first_ref[0], i)
    num = jnp.where(seen, jnp.int32(sizes.num_heads), jnp.int32(0))
    summed_ts = jnp.zeros((sizes.rows, sizes.columns), jnp.float32)
    _gpu.store(out_ref.at[b, rows, columns], lax.fori_loop(jnp.int32(0), num, head, summed_ts))


def _dq_body(sizes, first_ref, q_ref, k_ref, w_ref, dscores_ref, dq_ref, dw_ref):
    b, i, n = (pl.program_id(axis) for axis in range(3))
    rows = pl.ds(i * sizes.rows, sizes.rows)
    q_tu, w_t = _gpu.load(q_ref.at[b, rows, n, :]), _gpu.load(w_ref.at[b, n, rows])

    def step(j, carry):
        dq_tu, dw_t = carry
        columns = pl.ds(j * sizes.columns, sizes.columns)
        k_su = _gpu.load(k_ref.at[b, columns, :])
        dots_ts = _gpu.dot(q_tu, k_su, trans_b=True, nearly_exact=True)
        ds_ts = jnp.where(dots_ts > 0, _gpu.load(dscores_ref.at[b, rows, columns]), 0)
        dw_t += jnp.sum(ds_ts * dots_ts, axis=1)
        ddots_ts = (w_t[:, None] * ds_ts).astype(k_su.dtype)
        return dq_tu + _gpu.dot(ddots_ts, k_su, nearly_exact=True), dw_t

    init = jnp.zeros(q_tu.shape, jnp.float32), jnp.zeros(w_t.shape, jnp.float32)
    num = sizes.key_tiles_below(first_ref[0], i)
    dq_tu, dw_t = lax.fori_loop(jnp.int32(0), num, step, init)
    _gpu.store(dq_ref.at[b, rows, n, :], dq_tu)
    _gpu.store(dw_ref.at[b, n, rows], dw_t)


def _dk_body(sizes, first_ref, q_ref, k_ref, w_ref, dscores_ref, dk_ref):
    b, g, j = (pl.program_id(axis) for axis in range(3))
    heads = sizes.num_heads // dk_ref.shape[1]
    columns = pl.ds(j * sizes.columns, sizes.columns)
    k_su = _gpu.load(k_ref.at[b, columns, :])

    def step(number, dk_su):
        i, n = number // heads, g * heads + number % heads
        rows = pl.ds(i * sizes.rows, sizes.rows)
        q_tu = _gpu.load(q_ref.at[b, rows, n, :])
        dots_ts = _gpu.dot(q_tu, k_su, trans_b=True, nearly_exact=True)
        ds_ts = jnp.where(dots_ts > 0, _gpu.load(dscores_ref.at[b, rows, columns]), 0)
        w_t = _gpu.load(w_ref.at[b, n, rows])
        ddots_ts = (w_t[:, None] * ds_ts).astype(q_tu.dtype)
        return dk_su + _gpu.dot(ddots_ts, q_tu, trans_a=True, nearly_exact=True)

    # the first query tile that can see this one
    begin = jnp.maximum(j * sizes.columns - first_ref[0], 0) // sizes.rows
    begin = jnp.minimum(begin, sizes.query_tiles) * heads
    end = jnp.int32(sizes.query_tiles * heads)
    dk_su = lax.fori_loop(begin, end, step, jnp.zeros(k_su.shape, jnp.float32))
    _gpu.store(dk_ref.at[b, g, columns, :], dk_su)
