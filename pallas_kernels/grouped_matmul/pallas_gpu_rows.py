"""Kernel on GPUs: sorted rows times the weight of their group, or its transpose."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import gated_pair, pair_gradients
from pallas_kernels.grouped_matmul.tiles import Tiles

# Programs that run side by side take this many tiles of rows under one tile of columns, then the
# next columns: 16 x 128 rows of 3584 are 15 MB, which stay in the second-level cache meanwhile.
NEIGHBOURS = 16


class Product(NamedTuple):
    """What is static of one call.

    Attributes:
      num_groups: a tile of a higher group is zeros.
      depth, width: of the summed dim and of the weight's columns that are not summed.
      across: the weight [width, depth] is read across.
      pieces: first columns of the parts of the weight that an activation joins: (0,) or (0, F/2).
      activation, betas: of the parts; None for none.
      backward: the result is the gradient of what the activation reads.
      rank: of the second pair of factors, a power of two from 16 on, or 0 for none.
      scale: of the result.
      shared_weight, shared_low: all groups have the same weight, the same second factor.
      tiles: sizes.
    """

    num_groups: int
    depth: int
    width: int
    across: bool
    pieces: tuple[int, ...]
    activation: str | None
    betas: tuple
    backward: bool
    rank: int
    scale: float
    shared_weight: bool
    shared_low: bool
    tiles: Tiles


def run(
    call: Product, items_3L: jax.Array, x_RD: jax.Array, weight: tuple[jax.Array, ...],
    low: tuple[jax.Array, jax.Array] | None = None, d_out_RF: jax.Array | None = None,
    *, name: str,
) -> jax.Array:  # fmt: skip
    """One row of the result for every row of `x_RD`.

    Args:
      call: what is static.
      items_3L: tiles of `worklist.tiles`, as many as a multiple of `NEIGHBOURS`.
      weight: [E K, F], or packed [E K/2, F] and scales [E K/32, F].
      low: [R, Q] and the groups' [E Q, width] (across: [E width, Q]), whose product is added.
      d_out_RF: cotangent of the activation's result, for `backward`.
    """
    num_rows, tiles = x_RD.shape[0], call.tiles
    out_width = call.width // len(call.pieces)
    num_cols = -(-out_width // tiles.cols)
    supers = items_3L.shape[1] // NEIGHBOURS
    args = [items_3L, x_RD, *weight, *(low or ())]
    args += [d_out_RF] if d_out_RF is not None else []
    shape = (num_rows, call.width if call.backward else out_width)
    return _gpu.call(
        functools.partial(_body, call),
        name=name,
        grid=(NEIGHBOURS, num_cols, supers),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(args),
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(shape, x_RD.dtype),
        warps=tiles.warps,
        stages=tiles.stages,
    )(*args)


def _body(call: Product, items_ref: Any, x_ref: Any, *refs: Any) -> None:
    tiles, out_ref, dtype = call.tiles, refs[-1], x_ref.dtype
    weight_refs, low_refs, d_out_ref = _sorted_refs(call, refs[:-1])
    item = pl.program_id(2) * NEIGHBOURS + pl.program_id(0)
    col = pl.program_id(1) * tiles.cols
    group, first, end = items_ref[0, item], items_ref[1, item], items_ref[2, item]
    mine_r1 = (first + lax.iota(jnp.int32, tiles.rows) < end)[:, None]
    rows = pl.ds(first, tiles.rows)
    real = (group < call.num_groups) & (first < end)
    group = jnp.minimum(group, call.num_groups - 1)
    out_width = call.width // len(call.pieces)

    def step(i: Any, sums: tuple) -> tuple:
        d = i * tiles.depth
        mask = mine_r1 & _below(call.depth, d, tiles.depth)[None, :]
        x_rd = _gpu.load(x_ref.at[rows, pl.ds(d, tiles.depth)], mask)
        new = []
        for total, piece in zip(sums, call.pieces, strict=True):
            at = (col, d) if call.across else (d, piece + col)
            w = _weight_tile(call, weight_refs, group, at, piece + out_width, dtype)
            new.append(total + _gpu.dot(x_rd, w, trans_b=call.across))
        return tuple(new)

    # no steps, so zeros, for a tile of rows that no group owns: nothing of it is read
    steps = real.astype(jnp.int32) * -(-call.depth // tiles.depth)
    sums = _start(call, low_refs, group, rows, mine_r1 & real, col, out_width)
    sums = lax.fori_loop(jnp.int32(0), steps, step, sums)
    mask = mine_r1 & _below(out_width, col, tiles.cols)[None, :]
    d_out = None
    if d_out_ref is not None:
        d_out = _gpu.load(d_out_ref.at[rows, pl.ds(col, tiles.cols)], mask & real)
    for piece, value in zip(call.pieces, _finished(call, sums, d_out), strict=False):
        _gpu.store(out_ref.at[rows, pl.ds(piece + col, tiles.cols)], value, mask)


def _sorted_refs(call: Product, refs: tuple) -> tuple[tuple, tuple, Any]:
    """References of the weight, of the second pair of factors, of the cotangent."""
    end = len(refs) - call.backward
    begin = end - (2 if call.rank else 0)
    return refs[:begin], refs[begin:end], refs[end] if call.backward else None


def _below(limit: int, start: Any, size: int) -> jax.Array:
    """[size]: whether `start`, `start + 1`, ... are below `limit`; known where all must be."""
    if limit % size == 0:
        return jnp.ones((size,), jnp.bool_)
    return start + lax.iota(jnp.int32, size) < limit


def _weight_tile(
    call: Product, refs: tuple, group: Any, at: tuple[Any, Any], limit: int, dtype: Any
) -> jax.Array:
    """Tile of a group's weight from (k, f), in its own order; zeros outside of it."""
    tiles, (k, f) = call.tiles, at
    size_k, size_f = (
        (tiles.cols, tiles.depth) if call.across else (tiles.depth, tiles.cols)
    )  # fmt: skip
    num_k = call.width if call.across else call.depth
    limit_f = call.depth if call.across else limit
    group = 0 if call.shared_weight else group

    def part(ref: Any, per: int) -> jax.Array:
        """Rows that hold `per` values along K each."""
        rows, cols = _below(num_k // per, k // per, size_k // per), _below(limit_f, f, size_f)
        where = pl.ds(group * (num_k // per) + k // per, size_k // per), pl.ds(f, size_f)
        return _gpu.load(ref.at[where], rows[:, None] & cols[None, :])

    if len(refs) == 1:
        return part(refs[0], 1)
    return unpack(part(refs[0], 2), part(refs[1], mxfp4.BLOCK), dtype)


def unpack(packed: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """`mxfp4.decode` of a tile [k/2, f] and its scales [k/32, f]."""
    blocks, width = scales.shape
    bytes_ = packed.reshape(blocks, mxfp4.BLOCK // 2, width).astype(jnp.int32)
    scale = scales.astype(jnp.int32)[:, None, :]
    low, high = (
        mxfp4.values_of(mxfp4.bits_of(code & 15, scale), dtype) for code in (bytes_, bytes_ >> 4)
    )
    pairs = jnp.stack([low, high], axis=-1)  # of the two along K, which is to be the slower
    return pairs.transpose(0, 1, 3, 2).reshape(blocks * mxfp4.BLOCK, width)


def _start(
    call: Product, refs: tuple, group: Any, rows: Any, mine_r1: jax.Array, col: Any, limit: int
) -> tuple:
    """Sums before the loop: zeros, or the product of the second pair of factors."""
    tiles = call.tiles
    if not call.rank:
        return (jnp.zeros((tiles.rows, tiles.cols), jnp.float32),) * len(call.pieces)
    low_ref, other_ref = refs
    group = 0 if call.shared_low else group
    ranks = jnp.ones((call.rank,), jnp.bool_)
    low = _gpu.load(low_ref.at[rows, pl.ds(0, call.rank)], mine_r1 & ranks[None, :])
    cols = _below(limit, col, tiles.cols)
    sums = []
    for piece in call.pieces:
        if call.across:
            at = pl.ds(group * call.width + col, tiles.cols), pl.ds(0, call.rank)
            other = _gpu.load(other_ref.at[at], cols[:, None] & ranks[None, :])
        else:
            at = pl.ds(group * call.rank, call.rank), pl.ds(piece + col, tiles.cols)
            other = _gpu.load(other_ref.at[at], ranks[:, None] & cols[None, :])
        sums.append(_gpu.dot(low, other, trans_b=call.across))
    return tuple(sums)


def _finished(call: Product, sums: tuple, d_out: jax.Array | None) -> tuple:
    """What is stored: the parts joined, their gradients, or the sum itself."""
    if call.activation is None:
        return (sums[0] if call.scale == 1 else sums[0] * call.scale,)
    gate, up = sums
    if d_out is None:
        return (gated_pair(gate, up, call.activation, call.betas),)
    return pair_gradients(gate, up, d_out.astype(jnp.float32), call.activation, call.betas)
