"""Kernel on TPUs: sorted rows times the weight of their group, or its transpose."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu
from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import gated_pair, pair_gradients

VMEM_BYTES = 48 << 20
_PER_SCALE = mxfp4.BLOCK // 2  # bytes of codes under one scale
_PART = 8 * _PER_SCALE  # bytes of codes along K that are unpacked at a time: a tile of scales


class Product(NamedTuple):
    """What is static of one call.

    Attributes:
      num_groups: a visit of a higher group is of rows that are zeros.
      depth, width: of the summed dim, and of the result.
      across: weights are [width, depth] and read across.
      offsets: first tile of columns of each weight: one, or two that an activation joins.
      activation, betas: of the two; None for none.
      backward: two results, the gradients of what the activation reads.
      packed: weights are MXFP4; even ones along K, then odd ones.
      adapted: the product of a second pair of factors is added.
      scale: of the result.
      tile_rows, tile_cols: of the result.
    """

    num_groups: int
    depth: int
    width: int
    across: bool
    offsets: tuple[int, ...]
    activation: str | None
    betas: tuple
    backward: bool
    packed: bool
    adapted: bool
    scale: float
    tile_rows: int
    tile_cols: int


def run(
    call: Product, items_5L: jax.Array, x_RD: jax.Array, weights: list[tuple[jax.Array, ...]],
    low_RQ: jax.Array | None = None, others: list[jax.Array] | None = None,
    d_out_RF: jax.Array | None = None, *, name: str,
) -> list[jax.Array]:  # fmt: skip
    """[R, width], of `backward` two of it.

    Args:
      call: what is static.
      items_5L: `worklist.visits`, and the item whose rows and weight are read.
      weights: of each offset [G, K, F] (G is 1 where groups share it), or codes and scales.
      low_RQ, others: second pair of factors: [R, Q], and of each offset [G, Q, F] or [G, K, Q].
      d_out_RF: cotangent of the activation's result, for `backward`.
    """
    bm, bn = call.tile_rows, call.tile_cols
    args: list[jax.Array] = [x_RD]
    in_specs = [pl.BlockSpec((bm, call.depth), lambda n, i, t: (t[1, t[4, i]], 0))]
    if low_RQ is not None:
        args.append(low_RQ)
        in_specs.append(pl.BlockSpec((bm, low_RQ.shape[1]), lambda n, i, t: (t[1, t[4, i]], 0)))
    for p, offset in enumerate(call.offsets):
        for part in (*weights[p], *([others[p]] if others else [])):
            args.append(part)
            in_specs.append(_weight_spec(call, part, offset))
    if d_out_RF is not None:
        args.append(d_out_RF)
        in_specs.append(pl.BlockSpec((bm, bn), lambda n, i, t: (t[1, t[4, i]], n)))
    shape = jax.ShapeDtypeStruct((x_RD.shape[0], call.width), x_RD.dtype)
    out_spec = pl.BlockSpec((bm, bn), lambda n, i, t: (t[1, i], n))
    num_out = 2 if call.backward else 1
    plain = (bn, call.depth) if call.across else (call.depth, bn)
    scratch = [pltpu.VMEM(plain, x_RD.dtype)] * (len(call.offsets) if call.packed else 0)
    return _tpu.call(
        functools.partial(_body, call),
        name=name,
        grid=(-(-call.width // bn), items_5L.shape[1]),
        in_specs=in_specs,
        out_specs=[out_spec] * num_out,
        out_shape=[shape] * num_out,
        parallel=1,
        num_prefetch=1,
        scratch=scratch,
        vmem_bytes=VMEM_BYTES,
    )(items_5L, *args)


def _weight_spec(call: Product, part: jax.Array, offset: int) -> pl.BlockSpec:
    """Columns (across: rows) of the tile, and all of the other dim; `part` has K or fewer rows."""
    last = part.shape[0] - 1

    def at(n: Any, i: Any, t: Any) -> tuple[Any, Any, Any]:
        group = jnp.minimum(t[0, t[4, i]], last)
        return (group, n, 0) if call.across else (group, 0, n + offset)

    if not call.across:
        return pl.BlockSpec((None, part.shape[1], call.tile_cols), at)
    per = call.width // part.shape[1]  # values along K in a row
    return pl.BlockSpec((None, call.tile_cols // per, part.shape[2]), at)


def _body(call: Product, items_ref: Any, x_ref: Any, *refs: Any) -> None:
    num_out, num_pieces = (2 if call.backward else 1), len(call.offsets)
    scratch = refs[len(refs) - num_pieces :] if call.packed else ()
    refs = refs[: len(refs) - len(scratch)]
    outs, refs = refs[-num_out:], refs[:-num_out]
    d_out_ref = refs[-1] if call.backward else None
    low_ref = refs[0] if call.adapted else None
    refs = refs[1:] if call.adapted else refs
    per_piece = 1 + call.packed + call.adapted
    pieces = [refs[p * per_piece : (p + 1) * per_piece] for p in range(num_pieces)]

    i = pl.program_id(1)
    before = jnp.maximum(i - 1, 0)
    group, tile, first, end = (items_ref[row, i] for row in range(4))
    fresh = (i == 0) | (items_ref[1, before] != tile)
    row = tile * call.tile_rows + lax.broadcasted_iota(
        jnp.int32, (call.tile_rows, call.tile_cols), 0
    )
    mine = (row >= first) & (row < end)

    def write(values: tuple) -> None:
        """Own rows; on the first visit of a tile nothing is there yet."""
        for ref, value in zip(outs, values, strict=True):
            old = jnp.where(fresh, jnp.zeros((), ref.dtype), ref[...])
            ref[...] = jnp.where(mine, value.astype(ref.dtype), old)

    if call.packed:

        @pl.when((group < call.num_groups) & ((i == 0) | (items_ref[0, before] != group)))
        def unpack_weights():
            for target, (codes, scales, *_) in zip(scratch, pieces, strict=True):
                unpack_into(target, codes, scales)

    @pl.when((first < end) & (group < call.num_groups))
    def multiply():
        sums = []
        for p, parts in enumerate(pieces):
            weight = scratch[p][...] if call.packed else parts[0][...]
            total = _tpu.dot(x_ref[...], weight, trans_b=call.across)
            if low_ref is not None:
                total += _tpu.dot(low_ref[...], parts[-1][...], trans_b=call.across)
            sums.append(total)
        write(_finished(call, sums, d_out_ref))

    @pl.when((first < end) & (group == call.num_groups))
    def clear():
        write((jnp.zeros((), jnp.float32),) * num_out)


def _finished(call: Product, sums: list[jax.Array], d_out_ref: Any) -> tuple:
    """The parts joined, their gradients, or the sum itself."""
    if call.activation is None:
        return (sums[0] if call.scale == 1 else sums[0] * call.scale,)
    gate, up = sums
    if not call.backward:
        return (gated_pair(gate, up, call.activation, call.betas),)
    d_out = d_out_ref[...].astype(jnp.float32)
    return pair_gradients(gate, up, d_out, call.activation, call.betas)


def unpack_into(target: Any, codes: Any, scales: Any) -> None:
    """`unpack` of whole references, the odd ones behind the even ones; by parts, for short code."""
    half = codes.shape[0]
    size = _PART if half % _PART == 0 else half

    def step(i: Any, _: None) -> None:
        at = pl.multiple_of(i * size, size)
        own = pl.multiple_of(i * (size // _PER_SCALE), size // _PER_SCALE)
        low, high = unpack(
            codes[pl.ds(at, size)], scales[pl.ds(own, size // _PER_SCALE)], target.dtype
        )
        target[pl.ds(at, size)] = low
        target[pl.ds(half + at, size)] = high

    lax.fori_loop(0, half // size, step, None)


def unpack(codes: jax.Array, scales: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`mxfp4.decode` of [k/2, f] with scales [k/32, f]: even ones along k, then odd ones."""
    half, width = codes.shape
    blocks = (scales.shape[0], _PER_SCALE, width)
    scale = jnp.broadcast_to(scales.astype(jnp.int32)[:, None, :], blocks).reshape(half, width)
    bytes_ = codes.astype(jnp.int32)
    low, high = (
        mxfp4.values_of(mxfp4.bits_of(code & 15, scale), dtype) for code in (bytes_, bytes_ >> 4)
    )
    return low, high
