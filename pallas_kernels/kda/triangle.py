"""Lower triangles of decayed products inside a chunk, their inverse, and their gradient.

For rows x, columns k and log decays g of one chunk, all products are

    A_ij = sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}),   i >= j.

A pair of positions is handled where it is parted when the chunk is halved, its halves halved, and
so on: with the border between the halves as reference, the exponent is (sum from the border to i) +
(sum from j to the border). Both are sums of at most zero, so nothing overflows whatever the gate,
each half is a matrix product, and no sum reaches past row i or over a document's border.
"""

import functools

import jax.numpy as jnp

matmul = functools.partial(jnp.matmul, precision="highest")


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


def decays(g_cH):
    """Decay factors of one chunk, from its log decays [..., c, H].

    Returns:
      levels: for s = 1, 2, ..., c/2 the factors from the border between halves of s rows to each
        row of the second half, and from each row of the first half to it: [..., c/2s, s, H].
      from_start: sums of g from the chunk's start to each row, that row included, [..., c, H].
      to_end: sums of g after each row, [..., c, H].
    """
    from_start, to_end = g_cH, jnp.zeros_like(g_cH)
    levels = []
    s = 1
    while s < g_cH.shape[-2]:
        start_1, start_2 = _halves(from_start, s)
        end_1, end_2 = _halves(to_end, s)
        levels.append((jnp.exp(start_2), jnp.exp(end_1)))
        from_start = _join(start_1, start_2 + start_1[..., -1:, :])
        to_end = _join(end_1 + start_2[..., -1:, :], end_2)
        s *= 2
    return levels, from_start, to_end


def _same_segment(segment_ids_Bc, s):
    """[B, 1, c/2s, s, s]: whether row i of a second half is in the document of row j before it."""
    first, second = _halves(segment_ids_Bc[:, None, :, None], s)
    return second == transposed(first)


def products_and_inverse(q_cH, k_cH, erase_cH, levels, segment_ids_Bc):
    """The triangle of q with k, and (I + strict triangle of erase with k)^-1, both [..., c, c]."""
    triangle = jnp.sum(q_cH * k_cH, axis=-1)[..., None, None]
    inverse = jnp.ones_like(triangle)
    s = 1
    for to_row, to_border in levels:
        rows = [_halves(x, s)[1] * to_row for x in (q_cH, erase_cH)]
        columns = _halves(k_cH, s)[0] * to_border
        parted = matmul(jnp.concatenate(rows, axis=-2), transposed(columns))
        parted_q, parted_e = parted[..., :s, :], parted[..., s:, :]
        if segment_ids_Bc is not None:
            same = _same_segment(segment_ids_Bc, s)
            parted_q, parted_e = jnp.where(same, parted_q, 0), jnp.where(same, parted_e, 0)
        first, second = _pairs(inverse)
        inverse = _lower(first, -matmul(second, matmul(parted_e, first)), second)
        first, second = _pairs(triangle)
        triangle = _lower(first, parted_q, second)
        s *= 2
    return triangle[..., 0, :, :], inverse[..., 0, :, :]


def _pairs(blocks):
    """[..., 2n, s, s] -> the even and the odd blocks, [..., n, s, s]."""
    return blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]


def _lower(first, corner, second):
    """[[first, 0], [corner, second]]."""
    top = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def products_vjp(q_cH, k_cH, erase_cH, levels, segment_ids_Bc, d_triangle, d_strict):
    """Gradients to q, erase (as rows) and k (as columns) from those of both triangles, [..., c, c].

    Only the lower parts of `d_triangle` and `d_strict` are read.
    """
    blocks = jnp.stack([d_triangle, d_strict], axis=-3)[..., None, :, :, :]  # [..., 1, 2, c, c]
    dq, d_erase, dk = (jnp.zeros_like(q_cH) for _ in range(3))
    for level in reversed(range(len(levels))):
        s = 2**level
        to_row, to_border = levels[level]
        corner = blocks[..., s:, :s]
        if segment_ids_Bc is not None:
            corner = jnp.where(_same_segment(segment_ids_Bc, s)[..., None, :, :], corner, 0)
        corner = corner.reshape(*corner.shape[:-3], 2 * s, s)
        rows = [_halves(x, s)[1] * to_row for x in (q_cH, erase_cH)]
        columns = _halves(k_cH, s)[0] * to_border
        d_rows = matmul(corner, columns)
        d_columns = matmul(transposed(corner), jnp.concatenate(rows, axis=-2)) * to_border
        nothing = jnp.zeros_like(d_columns)
        dq += _join(nothing, d_rows[..., :s, :] * to_row)
        d_erase += _join(nothing, d_rows[..., s:, :] * to_row)
        dk += _join(d_columns, nothing)
        halves = jnp.stack([blocks[..., :s, :s], blocks[..., s:, s:]], axis=-4)
        blocks = halves.reshape(*halves.shape[:-5], -1, 2, s, s)
    diagonal = blocks[..., 0, 0, 0][..., None]
    return dq + diagonal * k_cH, d_erase, dk + diagonal * q_cH
