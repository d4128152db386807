"""Gradients of sparse_flash_attention on GPUs, a block of queries at a time.

The first kernel leaves the probabilities p and their gradients ds in memory. The second one has all
heads of a query and some columns: so no program holds many sums, and a row's gradient is summed
over the heads before it is added, atomically, to what other queries gave that row.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.blocks import limit_by_bytes, scan_queries
from pallas_kernels.choose import target_chip
from pallas_kernels.sparse_flash_attention.pallas_gpu_tile import (
    LOG2_E,
    Heads,
    Sizes,
    Slots,
    add,
    dots,
    head_tile,
    num_tiles,
    of_query,
    of_row,
    used_slots,
)
from pallas_kernels.sparse_flash_attention.tiles import SCORES_BYTES, Tile, Tiles, tiles_for


def gradients(sizes: Sizes, queries, rows, indices, lse, dout, shift):
    """Of the queries' and the rows' parts, where ds = p (dout latent' + shift)."""
    tiles = tiles_for(sizes.C, dout.dtype.itemsize, target_chip())

    def query_block(sums, start, blocks):
        indices, lse, dout, shift, *queries = blocks
        slots = (used_slots(indices), indices)
        p, ds = _scores(sizes, tiles, (*slots, lse, shift, dout), queries, rows)
        columns = functools.partial(_columns, sizes, tiles.columns, slots)
        sum_latent, dq_latent = columns((ds, p), (queries[0], dout), rows[0], sums[0])
        rest = [
            columns((ds,), (q,), row, total)
            for q, row, total in zip(queries[1:], rows[1:], sums[1:], strict=True)
        ]
        return (sum_latent, *(x[0] for x in rest)), (dq_latent, *(x[1] for x in rest))

    per_query = 2 * sizes.B * sizes.N * _padded_slots(sizes, tiles) * dout.dtype.itemsize
    limit = limit_by_bytes(per_query, SCORES_BYTES, indices.shape[1])
    limit = 1 << limit.bit_length() - 1  # which divides most lengths, so that nothing is padded
    sums = tuple(jnp.zeros(x.shape, jnp.float32) for x in rows)
    sums, d_queries = scan_queries(query_block, sums, (indices, lse, dout, shift, *queries), limit)
    return d_queries, tuple(x.astype(row.dtype) for x, row in zip(sums, rows, strict=True))


def _padded_slots(sizes: Sizes, tiles: Tiles) -> int:
    return pl.cdiv(sizes.J, tiles.columns.keys) * tiles.columns.keys


def _scores(sizes: Sizes, tiles: Tiles, given, queries, rows):
    """p and ds of every slot that a query uses, [B, T, J, N] in the inputs' dtype."""
    tile = tiles.scores
    heads = head_tile(sizes.N, tile.heads)
    B, T, _ = given[1].shape
    out = jax.ShapeDtypeStruct((B, T, _padded_slots(sizes, tiles), sizes.N), rows[0].dtype)
    return _gpu.call(
        functools.partial(_scores_body, sizes, heads, tiles, len(queries)),
        name="sparse_flash_attention_ds", grid=(pl.cdiv(sizes.N, heads), T, B),
        in_specs=[of_row(given[0]), *map(of_query, (*given[1:], *queries)), *map(of_row, rows)],
        out_specs=[of_query(out)] * 2, out_shape=[out] * 2, warps=tile.warps, stages=tile.stages,
    )(*given, *queries, *rows)  # fmt: skip


def _scores_body(sizes: Sizes, num_heads, tiles: Tiles, num, used_ref, indices_ref, *refs):
    (lse_ref, shift_ref, dout_ref), refs = refs[:3], refs[3:]
    q_refs, rows_refs, (p_ref, ds_ref) = refs[:num], refs[num : 2 * num], refs[2 * num :]
    heads = Heads(pl.program_id(0) * num_heads, num_heads, sizes.N)
    factor = sizes.scale * LOG2_E
    q_n, dout_nC = [heads.read(ref) for ref in q_refs], heads.read(dout_ref)
    lse_n1 = heads.read_thin(lse_ref)[:, None] * LOG2_E
    shift_n1 = heads.read_thin(shift_ref)[:, None]

    def step(number, _):
        slots = Slots.of(indices_ref, number, tiles.scores.keys)
        rows_j = slots.read(rows_refs)
        p_nj = jnp.exp2(dots(q_n, rows_j) * factor - lse_n1)
        p_nj = jnp.where(slots.chosen_j[None, :], p_nj, 0)
        ds_nj = p_nj * (_gpu.dot(dout_nC, rows_j[0], trans_b=True) + shift_n1) * sizes.scale
        for ref, value_nj in ((p_ref, p_nj), (ds_ref, ds_nj)):
            heads.write_across(ref, slots.at, value_nj.astype(ref.dtype).T)

    # whole tiles of the second kernel: what it reads must have been written
    num_read = num_tiles(used_ref, pl.program_id(1), tiles.columns.keys)
    lax.fori_loop(0, num_read * (tiles.columns.keys // tiles.scores.keys), step, None)


def _columns(sizes: Sizes, tile: Tile, slots, weights, factors, rows, total):
    """Adds ds' q (and p' dout, where given) to the rows' gradients [B, S, x].

    Returns:
      These, and the gradient of the queries [B, T, N, x], ds rows.
    """
    width = min(tile.heads, total.shape[2])
    given = (*slots, *weights, *factors, rows, total)
    out = [
        jax.ShapeDtypeStruct(total.shape, total.dtype),
        jax.ShapeDtypeStruct(factors[0].shape, factors[0].dtype),
    ]
    return _gpu.call(
        functools.partial(_columns_body, sizes, width, tile.keys, len(factors)),
        name="sparse_flash_attention_grad",
        grid=(total.shape[2] // width, slots[1].shape[1], sizes.B),
        in_specs=[
            of_row(given[0]), *map(of_query, (slots[1], *weights, *factors)),
            *map(of_row, (rows, total)),
        ],
        out_specs=[of_row(total), of_query(out[1])], out_shape=out,
        warps=tile.warps, stages=tile.stages, aliases={len(given) - 1: 0},
    )(*given)  # fmt: skip


def _columns_body(sizes: Sizes, width, num_keys, num, used_ref, indices_ref, *refs):
    weight_refs, factor_refs, rows_ref = refs[:num], refs[num : 2 * num], refs[2 * num]
    total_ref, dq_ref = refs[-2:]
    columns = (pl.program_id(0) * width, width)
    groups = _head_groups(sizes.N)
    factors = [[heads.read(ref, columns) for heads in groups] for ref in factor_refs]

    def step(number, dq_xn):
        slots = Slots.of(indices_ref, number, num_keys)
        rows_jx = _gpu.load_rows(rows_ref, slots.rows_j, slots.chosen_j, columns)
        weights = [[heads.read_across(ref, slots.at) for heads in groups] for ref in weight_refs]
        sum_jx = add(
            _gpu.dot(weight_jn, factor_nx)
            for both in zip(weights, factors, strict=True)
            for weight_jn, factor_nx in zip(*both, strict=True)
        )
        _gpu.add_rows(total_ref, slots.rows_j, sum_jx, slots.chosen_j, columns)
        return [
            dq + _gpu.dot(rows_jx, ds_jn, trans_a=True)
            for dq, ds_jn in zip(dq_xn, weights[0], strict=True)
        ]

    zeros = [jnp.zeros((width, heads.size), jnp.float32) for heads in groups]
    dq_xn = lax.fori_loop(0, num_tiles(used_ref, pl.program_id(1), num_keys), step, zeros)
    for heads, dq in zip(groups, dq_xn, strict=True):
        heads.write(dq_ref, dq.T, columns)


def _head_groups(num_heads: int) -> list[Heads]:
    """All heads in tiles of powers of two, 16 or more: 96 are 64 and 32."""
    groups, first = [], 0
    while first < num_heads:
        size = max(16, 1 << (num_heads - first).bit_length() - 1)
        groups.append(Heads(first, size, num_heads))
        first += size
    return groups
