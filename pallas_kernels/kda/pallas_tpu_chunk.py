"""What one chunk of one head computes on a TPU besides the state: tiles in, tiles out.

All pairs of rows are handled where halving the chunk parts them, as in `triangle.py`: every
exponent is a sum of log decays and at most 0, none reaches past its row. Here a level of the
halving is a product of all rows of which a mask picks the pairs, down to single rows, so that
nothing is cut where a tile cannot be.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu

_BLOCK = 16  # rows of which the inverse is found by substitution


class Decays(NamedTuple):
    """Sums of log decays inside one chunk, or their exponentials, or gradients to the sums."""

    near: list[jax.Array]  # for s = 1, 2, ..., c/2: between a row and the border that halves its
    # run of 2s rows, each [c, H]
    from_start: jax.Array  # [c, H], from the chunk's start to each row, that row included
    to_end: jax.Array  # [c, H], all after each row


class Document(NamedTuple):
    """Where documents end inside a chunk; all boolean."""

    real_c1: jax.Array  # no padding
    reads_entry_c1: jax.Array  # of the document that the entry state belongs to
    reaches_exit_c1: jax.Array  # of the document that the exit state belongs to
    passes_11: jax.Array  # both are one document
    same_cc: jax.Array


def rows_of(shape: tuple[int, ...]) -> jax.Array:
    """Index of the row, at every entry."""
    return lax.broadcasted_iota(jnp.int32, shape, 0)


def column(row_1c: jax.Array) -> jax.Array:
    """[1, c] -> [c, 1]."""
    return jnp.sum(jnp.where(_eye(row_1c.shape[1]), row_1c, 0), axis=1, keepdims=True)


def row(column_c1: jax.Array) -> jax.Array:
    """[c, 1] -> [1, c]."""
    return jnp.sum(jnp.where(_eye(column_c1.shape[0]), column_c1, 0), axis=0, keepdims=True)


def document(code_1c: jax.Array) -> Document:
    """From the codes of `pallas_tpu.document_codes`."""
    code_c1 = column(code_1c)
    number_c1, number_1c = jnp.abs(code_c1), jnp.abs(code_1c)
    last_11 = number_c1[-1:]
    return Document(
        code_c1 > 0, number_c1 == 1, number_c1 == last_11, last_11 == 1, number_c1 == number_1c
    )


def _eye(c: int) -> jax.Array:
    return rows_of((c, c)) == lax.broadcasted_iota(jnp.int32, (c, c), 1)


def _sizes(c: int) -> Iterator[int]:
    return (1 << level for level in range(c.bit_length() - 1))


def _in_second(x_cH: jax.Array, s: int) -> jax.Array:
    return rows_of(x_cH.shape) & s != 0


def _other_half(x_cH: jax.Array, s: int) -> jax.Array:
    """Row i is row i ^ s of x."""
    c = x_cH.shape[0]
    before = pltpu.roll(x_cH, s, 0)
    if 2 * s == c:
        return before
    return jnp.where(_in_second(x_cH, s), before, pltpu.roll(x_cH, c - s, 0))


def decays(g_cH: jax.Array) -> Decays:
    """Decay factors of a chunk, from log decays."""
    near, from_start, to_end, total = [], g_cH, jnp.zeros_like(g_cH), g_cH
    for s in _sizes(g_cH.shape[0]):
        second = _in_second(g_cH, s)
        near.append(jnp.exp(jnp.where(second, from_start, to_end)))
        other = _other_half(total, s)
        from_start += jnp.where(second, other, 0)
        to_end += jnp.where(second, 0, other)
        total += other
    return Decays(near, jnp.exp(from_start), jnp.exp(to_end))


def sums_vjp(d: Decays) -> jax.Array:
    """Gradient of the log decays, from those of their sums."""
    d_start, d_end, d_total = d.from_start, d.to_end, jnp.zeros_like(d.to_end)
    for s, d_near in reversed(list(zip(_sizes(d_start.shape[0]), d.near, strict=True))):
        second = _in_second(d_start, s)
        d_total += _other_half(d_total + jnp.where(second, d_start, d_end), s)
        d_start += jnp.where(second, d_near, 0)
        d_end += jnp.where(second, 0, d_near)
    return d_start + d_total


def _levels(shape: tuple[int, ...]) -> jax.Array:
    """At row i, counted from 0 again after c, and column j < i: log2 of the s that parts them.

    -1 elsewhere.
    """
    c = shape[1]
    i, j = rows_of(shape) & (c - 1), lax.broadcasted_iota(jnp.int32, shape, 1)
    level = sum(jnp.where(i ^ j >= s, 1, 0) for s in _sizes(c)) - 1
    return jnp.where(i > j, level, -1)


def stack(first: jax.Array, second: jax.Array) -> jax.Array:
    """Rows of both."""
    return jnp.concatenate([first, second], axis=0)


def products(
    q_cH: jax.Array, erase_cH: jax.Array, k_cH: jax.Array, factors: Decays, same_cc, dtype
) -> tuple[jax.Array, jax.Array]:
    """Triangles of q with k and, without the diagonal, of erase with k; [c, c] float32."""
    c = k_cH.shape[0]
    pairs_2cc = jnp.zeros((2 * c, c), jnp.float32)
    levels_2cc = _levels((2 * c, c))
    for level, factor_cH in enumerate(factors.near):
        rows, columns = _level(q_cH, erase_cH, k_cH, factor_cH, dtype)
        product = _tpu.dot(rows, columns, trans_b=True, exact=True)
        pairs_2cc = jnp.where(levels_2cc == level, product, pairs_2cc)
    scores, strict = pairs_2cc[:c], pairs_2cc[c:]
    if same_cc is not None:
        scores, strict = jnp.where(same_cc, scores, 0), jnp.where(same_cc, strict, 0)
    own_c1 = jnp.sum(q_cH * k_cH, axis=1, keepdims=True)
    return jnp.where(_eye(c), own_c1, scores), strict


def _level(q_cH, erase_cH, k_cH, factor_cH, dtype):
    rows_2cH = stack((q_cH * factor_cH).astype(dtype), (erase_cH * factor_cH).astype(dtype))
    return rows_2cH, (k_cH * factor_cH).astype(dtype)


def products_vjp(q_cH, erase_cH, k_cH, factors: Decays, d_pairs_2cc, dtype):
    """Gradients to q, erase, k and the sums of log decays, from those of both triangles.

    Of the first triangle's gradient the lower part is read, of the second's the strictly lower.
    """
    c = k_cH.shape[0]
    own_c1 = jnp.sum(jnp.where(_eye(c), d_pairs_2cc[:c], 0), axis=1, keepdims=True)
    dq, d_erase, dk = own_c1 * k_cH, jnp.zeros_like(k_cH), own_c1 * q_cH
    d_near, levels_2cc = [], _levels((2 * c, c))
    for level, factor_cH in enumerate(factors.near):
        rows, columns = _level(q_cH, erase_cH, k_cH, factor_cH, dtype)
        d_product = jnp.where(levels_2cc == level, d_pairs_2cc, 0).astype(dtype)
        d_rows = _tpu.dot(d_product, columns, exact=True)
        d_q_level, d_erase_level = d_rows[:c] * factor_cH, d_rows[c:] * factor_cH
        d_k_level = _tpu.dot(d_product, rows, trans_a=True, exact=True) * factor_cH
        dq += d_q_level
        d_erase += d_erase_level
        dk += d_k_level
        d_near.append(q_cH * d_q_level + erase_cH * d_erase_level + k_cH * d_k_level)
    return dq, d_erase, dk, d_near


def inverse(strict_cc: jax.Array) -> jax.Array:
    """(I + strict)^-1 in float32: by substitution in blocks of 16 rows, then by merging halves.

    With X and Y the inverses of two halves and P what lies between, the corner is -Y P X. No power
    of `strict` is formed.
    """
    blocks = _block_inverses(strict_cc)
    while len(blocks) > 1:
        s = len(blocks[0])
        merged: list[jax.Array] = []
        for first, second in zip(blocks[::2], blocks[1::2], strict=True):
            start = 2 * s * len(merged)
            between = strict_cc[start + s : start + 2 * s, start : start + s]
            corner = _tpu.dot(second, _tpu.dot(between, first, exact=True), exact=True)
            top = jnp.concatenate([first, jnp.zeros_like(first)], axis=1)
            merged.append(stack(top, jnp.concatenate([-corner, second], axis=1)))
        blocks = merged
    return blocks[0]


def _block_inverses(strict_cc):
    """Inverses of the blocks on the diagonal, which lie side by side while rows are replaced."""
    c = strict_cc.shape[0]
    rows, columns = rows_of((c, c)), lax.broadcasted_iota(jnp.int32, (c, c), 1)
    blocks = jnp.where(rows ^ columns < _BLOCK, strict_cc, 0).reshape(-1, _BLOCK, c)
    strict_bc = sum(blocks[m] for m in range(c // _BLOCK))
    lane_bc = lax.broadcasted_iota(jnp.int32, (_BLOCK, c), 1)
    first_bc = lane_bc & ~(_BLOCK - 1)
    result = jnp.where(lane_bc - first_bc == rows_of((_BLOCK, c)), 1.0, 0.0)
    for j in range(_BLOCK - 1):
        below_bc = jnp.take_along_axis(strict_bc, first_bc + j, axis=1)
        result -= below_bc * result[j : j + 1]
    return [result[:, m : m + _BLOCK] for m in range(0, c, _BLOCK)]
