"""Lower triangles of decayed products inside a chunk, their inverse, and their gradient.

For rows x, columns k and log decays g of one chunk, all products are

    A_ij = sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}),   i >= j.

Pairs inside a block of 8 rows are taken one by one. Any other pair is handled where it is parted
when the chunk is halved, its halves halved, and so on: with the border between the halves as
reference, the exponent is (sum from the border to i) + (sum from j to the border), so that the
products of two halves are one matrix product. All exponents are sums of g itself, never differences
of sums: they are at most 0 whatever the gate, lose no digits after a large |g|, and none reaches
past row i or over the border of row i's document.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

matmul = functools.partial(jnp.matmul, precision="highest")

_BLOCK = 8  # rows whose pairs are taken one by one: b*b*H exponentials against log2(b) more levels


class Decays(NamedTuple):
    """Sums of log decays inside one chunk, or their exponentials, or gradients to the sums."""

    pairs: jax.Array  # [..., c/b, b, b, H], from row j to row i of a block
    levels: list  # for s = b, 2b, ..., c/2: (border to row of the second half, row of the first
    # half to the border), each [..., c/2s, s, H]
    from_start: jax.Array  # [..., c, H], from the chunk's start to each row, that row included
    to_end: jax.Array  # [..., c, H], all after each row


def transposed(x):
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def _halves(x, s):
    """[..., c, W] -> the first and the second `s` rows of every run of 2s: [..., c/2s, s, W]."""
    blocks = x.reshape(*x.shape[:-2], -1, 2, s, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _join(first, second):
    """Inverse of `_halves`."""
    blocks = jnp.stack([first, second], axis=-3)
    return blocks.reshape(*blocks.shape[:-4], -1, blocks.shape[-1])


def _blocks(x):
    """[..., c, W] -> [..., c/b, b, W]."""
    b = min(_BLOCK, x.shape[-2])
    return x.reshape(*x.shape[:-2], -1, b, x.shape[-1])


def _which_to_sum(b):
    """0/1 matrix [b*b + 2b, b]: the rows between j and i, up to i, and after j."""
    i, j, m = np.ogrid[:b, :b, :b]
    between = ((j < m) & (m <= i)).reshape(b * b, b)
    return np.concatenate([between, np.tri(b, dtype=bool), ~np.tri(b, dtype=bool)])


def sums(g_cH) -> Decays:
    """The sums of log decays [..., c, H] that a chunk needs; linear in them."""
    g = _blocks(g_cH)
    b, H = g.shape[-2:]
    sums = matmul(jnp.asarray(_which_to_sum(b), g.dtype), g)
    pairs = sums[..., : b * b, :].reshape(*g.shape[:-2], b, b, H)
    from_start = sums[..., b * b : b * b + b, :].reshape(g_cH.shape)
    to_end = sums[..., b * b + b :, :].reshape(g_cH.shape)
    levels, s = [], b
    while s < g_cH.shape[-2]:
        start_1, start_2 = _halves(from_start, s)
        end_1, end_2 = _halves(to_end, s)
        levels.append((start_2, end_1))
        from_start = _join(start_1, start_2 + start_1[..., -1:, :])
        to_end = _join(end_1 + start_2[..., -1:, :], end_2)
        s *= 2
    return Decays(pairs, levels, from_start, to_end)


def sums_vjp(d_sums: Decays):
    """Gradient of the log decays, from those of their sums.

    Each term carries its own decay, so nothing large cancels in a gradient that is small.
    """
    return jax.linear_transpose(sums, d_sums.from_start)(d_sums)[0]


def decays(g_cH) -> Decays:
    """Decay factors from log decays [..., c, H]; pairs above the diagonal are 0."""
    factors = jax.tree.map(jnp.exp, sums(g_cH))
    lower = np.tri(factors.pairs.shape[-2], dtype=bool)[..., None]
    return factors._replace(pairs=jnp.where(lower, factors.pairs, 0))


def _in_one_document(values, second_ids, first_ids):
    """`values` [..., rows, columns] where both positions carry the same id, else 0."""
    return jnp.where(second_ids == transposed(first_ids), values, 0)


def products_and_inverse(q_cH, k_cH, erase_cH, factors: Decays, segment_ids_Bc):
    """The triangle of q with k, and (I + strict triangle of erase with k)^-1, both [..., c, c]."""
    decayed = factors.pairs * _blocks(k_cH)[..., None, :, :]
    triangle, strict = (
        jnp.sum(_blocks(x)[..., :, None, :] * decayed, axis=-1) for x in (q_cH, erase_cH)
    )
    ids = None if segment_ids_Bc is None else segment_ids_Bc[:, None, :, None]
    if ids is not None:
        own = _blocks(ids)
        triangle, strict = (_in_one_document(x, own, own) for x in (triangle, strict))
    inverse = _block_inverse(strict)
    for to_row, to_border in factors.levels:
        s = to_row.shape[-2]
        rows = [_halves(x, s)[1] * to_row for x in (q_cH, erase_cH)]
        columns = _halves(k_cH, s)[0] * to_border
        parted = matmul(jnp.concatenate(rows, axis=-2), transposed(columns))
        parted_q, parted_e = parted[..., :s, :], parted[..., s:, :]
        if ids is not None:
            first_ids, second_ids = _halves(ids, s)
            parted_q, parted_e = (
                _in_one_document(x, second_ids, first_ids) for x in (parted_q, parted_e)
            )
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _lower(first, -matmul(second, matmul(parted_e, first)), second)
        triangle = _lower(triangle[..., 0::2, :, :], parted_q, triangle[..., 1::2, :, :])
    return triangle[..., 0, :, :], inverse[..., 0, :, :]


def _block_inverse(strict):
    """(I + the strict lower part)^-1 of blocks [..., b, b], by merging inverses of halves.

    With X the inverses on the diagonal and P what lies between the halves, X - X P X is the next.
    """
    b = strict.shape[-1]
    row, column = np.ogrid[:b, :b]
    inverse = jnp.broadcast_to(jnp.eye(b, dtype=strict.dtype), strict.shape)
    s = 1
    while s < b:
        between = (row // (2 * s) == column // (2 * s)) & (row // s > column // s)
        parted = jnp.where(between, strict, 0)
        inverse -= parted if s == 1 else matmul(inverse, matmul(parted, inverse))
        s *= 2
    return inverse


def _lower(first, corner, second):
    """[[first, 0], [corner, second]]."""
    top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def products_vjp(q_cH, k_cH, erase_cH, factors: Decays, segment_ids_Bc, d_triangle, d_strict):
    """Gradients to q, erase (as rows), k (as columns) and the sums of log decays inside.

    They come from those of both triangles, [..., c, c]: of `d_triangle` the lower part is read, of
    `d_strict` the strictly lower part. The sums are (pairs, levels) of `Decays`.
    """
    blocks = jnp.stack([d_triangle, d_strict], axis=-3)[..., None, :, :, :]  # [..., 1, 2, c, c]
    if segment_ids_Bc is not None:
        ids = segment_ids_Bc[:, None, None, None, :, None]
        blocks = _in_one_document(blocks, ids, ids)
    pieces, d_levels = [], []
    for to_row, to_border in reversed(factors.levels):
        s = to_row.shape[-2]
        corner = blocks[..., s:, :s]
        corner = corner.reshape(*corner.shape[:-3], 2 * s, s)
        rows = [_halves(x, s)[1] * to_row for x in (q_cH, erase_cH)]
        columns = _halves(k_cH, s)[0] * to_border
        d_rows = matmul(corner, columns)
        d_rows_q, d_rows_e = d_rows[..., :s, :], d_rows[..., s:, :]
        d_columns = matmul(transposed(corner), jnp.concatenate(rows, axis=-2))
        d_levels.append((rows[0] * d_rows_q + rows[1] * d_rows_e, columns * d_columns))
        nothing = jnp.zeros_like(d_columns)
        pieces.append(
            (
                _join(nothing, d_rows_q * to_row),
                _join(nothing, d_rows_e * to_row),
                _join(d_columns * to_border, nothing),
            )
        )
        halves = jnp.stack([blocks[..., :s, :s], blocks[..., s:, s:]], axis=-4)
        blocks = halves.reshape(*halves.shape[:-5], -1, 2, s, s)
    *piece, d_pairs = _pairs_vjp(q_cH, k_cH, erase_cH, factors.pairs, blocks)
    dq, d_erase, dk = (sum(parts) for parts in zip(*pieces, piece, strict=True))
    return dq, d_erase, dk, (d_pairs, d_levels[::-1])


def _pairs_vjp(q_cH, k_cH, erase_cH, pairs, blocks):
    """The part of `products_vjp` inside blocks, whose gradients are [..., c/b, 2, b, b]."""
    b = blocks.shape[-1]
    to_q = blocks[..., 0, :, :, None]
    to_erase = jnp.where(np.tri(b, k=-1, dtype=bool)[..., None], blocks[..., 1, :, :, None], 0)
    decayed = pairs * _blocks(k_cH)[..., None, :, :]
    dq, d_erase = (jnp.sum(x * decayed, axis=-2) for x in (to_q, to_erase))
    rows = to_q * _blocks(q_cH)[..., None, :] + to_erase * _blocks(erase_cH)[..., None, :]
    dk = jnp.sum(rows * pairs, axis=-3)
    return *(x.reshape(k_cH.shape) for x in (dq, d_erase, dk)), rows * decayed
