"""Lower triangles of decayed products inside a chunk, their inverse, and their gradient.

For rows x, columns k and log decays g of one chunk, all products are

    A_ij = sum_d x_id k_jd exp(g_{j+1,d} + ... + g_{i,d}),   i >= j.

Every pair i > j is handled where it is parted when the chunk is halved, its halves halved, and so
on: with the border between the halves as reference, the exponent is (sum from the border to i) +
(sum from j to the border), so that the products of two halves are one matrix product. The halvings
inside a block of 16 rows are one batch of small products, of which a mask picks the pairs. All
exponents are sums of g itself, never differences of sums: they are at most 0 whatever the gate,
lose no digits after a large |g|, and none reaches past row i or over the border of its document.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 16  # rows whose halvings are one batch, each a product of all b rows


class Decays(NamedTuple):
    """Sums of log decays inside one chunk, or their exponentials, or gradients to the sums."""

    near: jax.Array  # [..., c/b, log2(b), b, H], for s = 1, 2, ..., b/2: between a row and the
    # border of its run of 2s rows
    far: list  # for s = b, 2b, ..., c/2: (border to row of the second half, row of the first
    # half to the border), each [..., c/2s, s, H]
    from_start: jax.Array  # [..., c, H], from the chunk's start to each row, that row included
    to_end: jax.Array  # [..., c, H], all after each row


def matmul(a, b):
    """Exact product over the last two axes, of equal leading axes.

    From the third on they are made one: XLA on CPU aborts the process at a product of rank 8, which
    `vmap` would reach. The first two, chunks and rows, stay, so that rows can be sharded.
    """
    batch = a.shape[:-2]
    a, b = (x.reshape(*batch[:2], math.prod(batch[2:]), *x.shape[-2:]) for x in (a, b))
    product = jnp.matmul(a, b, precision="highest")
    return product.reshape(*batch, *product.shape[-2:])


def transposed(x):
    """Swaps the last two axes."""
    return jnp.swapaxes(x, -1, -2)


def turned(x):
    """`transposed` in memory: a left factor read across is 2 to 8 times slower on CPU."""
    return jax.lax.optimization_barrier(transposed(x))


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


def _sizes(b):
    return 2 ** np.arange(b.bit_length() - 1)


def _parted(b):
    """For s = 1, 2, ..., b/2: where row i and column j lie in two halves of one run of 2s rows."""
    i, j = np.ogrid[:b, :b]
    s = _sizes(b)[:, None, None]
    return (i // (2 * s) == j // (2 * s)) & (i // s > j // s)


def _which_to_sum(b):
    """0/1 matrices over the rows of a block: of `near` [log2(b) b, b], up to row i, and after i."""
    i, m = np.ogrid[:b, :b]
    near = np.zeros((b.bit_length() - 1, b, b), bool)
    for level, s in enumerate(_sizes(b)):
        in_second = i // s % 2 == 1
        near[level] = (i // s == m // s) & np.where(in_second, m <= i, m > i)
    return near.reshape(-1, b), m <= i, m > i


def _for_each(matrix, blocks):
    """A constant repeated for each block: one for all would have XLA transpose the blocks."""
    matrix = jnp.asarray(matrix, blocks.dtype)
    return jnp.broadcast_to(matrix, (*blocks.shape[:-2], *matrix.shape))


def sums(g_cH) -> Decays:
    """The sums of log decays [..., c, H] that a chunk needs; linear in them."""
    g = _blocks(g_cH)
    b, H = g.shape[-2:]
    near, from_start, to_end = (matmul(_for_each(which, g), g) for which in _which_to_sum(b))
    near = near.reshape(*g.shape[:-2], b.bit_length() - 1, b, H)
    from_start, to_end = from_start.reshape(g_cH.shape), to_end.reshape(g_cH.shape)
    far, s = [], b
    while s < g_cH.shape[-2]:
        start_1, start_2 = _halves(from_start, s)
        end_1, end_2 = _halves(to_end, s)
        far.append((start_2, end_1))
        from_start = _join(start_1, start_2 + start_1[..., -1:, :])
        to_end = _join(end_1 + start_2[..., -1:, :], end_2)
        s *= 2
    return Decays(near, far, from_start, to_end)


def sums_vjp(d_sums: Decays):
    """Gradient of the log decays, from those of their sums: the transpose of `sums`.

    Each term carries its own decay, so nothing large cancels in a gradient that is small.
    """
    d_start, d_end = d_sums.from_start, d_sums.to_end
    for d_start_2, d_end_1 in reversed(d_sums.far):
        s = d_start_2.shape[-2]
        last = np.arange(s)[:, None] == s - 1
        start_1, start_2 = _halves(d_start, s)
        end_1, end_2 = _halves(d_end, s)
        start_1, start_2 = (
            x + jnp.where(last, jnp.sum(d, -2, keepdims=True), 0)
            for x, d in ((start_1, start_2), (start_2, end_1))
        )
        d_start, d_end = _join(start_1, start_2 + d_start_2), _join(end_1 + d_end_1, end_2)
    d_start, d_end = _blocks(d_start), _blocks(d_end)
    which = _which_to_sum(d_start.shape[-2])
    d_near = d_sums.near.reshape(*d_start.shape[:-2], len(which[0]), d_start.shape[-1])
    near, start, end = (
        matmul(_for_each(rows.T, d), d)
        for rows, d in zip(which, (d_near, d_start, d_end), strict=True)
    )
    return (near + start + end).reshape(d_sums.to_end.shape)


def decays(g_cH) -> Decays:
    """Decay factors from log decays [..., c, H]."""
    return jax.tree.map(jnp.exp, sums(g_cH))


def _in_one_document(values, second_ids, first_ids):
    """`values` [..., rows, columns] where both positions carry the same id, else 0."""
    return jnp.where(second_ids == transposed(first_ids), values, 0)


def _near(x_cH, factors: Decays):
    """Rows [..., c, H] times their decays to borders inside blocks: [..., c/b, log2(b), b, H]."""
    return _blocks(x_cH)[..., None, :, :] * factors.near


def _over_levels(x):
    """Sum over axis -3, in one loop: XLA's own sum on CPU took 5 ms for 4 MB at some shapes."""
    *leading, levels, b, W = x.shape
    return sum((x[..., i, :, :] for i in range(levels)), jnp.zeros((*leading, b, W), x.dtype))


def products_and_inverse(q_cH, k_cH, erase_cH, factors: Decays, ids_c1):
    """The triangle of q with k, and (I + strict triangle of erase with k)^-1, both [..., c, c]."""
    b = factors.near.shape[-2]
    columns = transposed(_near(k_cH, factors))
    triangle, strict = (
        _over_levels(jnp.where(_parted(b), matmul(_near(x, factors), columns), 0))
        for x in (q_cH, erase_cH)
    )
    own = jnp.sum(_blocks(q_cH) * _blocks(k_cH), axis=-1, keepdims=True)
    triangle += jnp.where(np.eye(b, dtype=bool), own, 0)
    if ids_c1 is not None:
        own = _blocks(ids_c1)
        triangle, strict = (_in_one_document(x, own, own) for x in (triangle, strict))
    inverse = _block_inverse(strict)
    for to_row, to_border in factors.far:
        s = to_row.shape[-2]
        columns = transposed(_halves(k_cH, s)[0] * to_border)
        parted_q, parted_e = (matmul(_halves(x, s)[1] * to_row, columns) for x in (q_cH, erase_cH))
        if ids_c1 is not None:
            first_ids, second_ids = _halves(ids_c1, s)
            parted_q, parted_e = (
                _in_one_document(x, second_ids, first_ids) for x in (parted_q, parted_e)
            )
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        inverse = _lower(inverse, -matmul(second, matmul(parted_e, first)))
        triangle = _lower(triangle, parted_q)
    return triangle[..., 0, :, :], inverse[..., 0, :, :]


def _block_inverse(strict):
    """(I + the strict lower part)^-1 of blocks [..., b, b], by merging inverses of halves.

    With X the inverses on the diagonal and P what lies between the halves, X - X P X is the next.
    """
    b = strict.shape[-1]
    inverse = jnp.broadcast_to(jnp.eye(b, dtype=strict.dtype), strict.shape)
    for level, between in enumerate(_parted(b)):
        parted = jnp.where(between, strict, 0)
        inverse -= matmul(inverse, matmul(parted, inverse)) if level else parted
    return inverse


def _lower(blocks, corners):
    """[[first, 0], [corner, second]] of pairs of blocks [..., 2n, s, s]: [..., n, 2s, 2s]."""
    first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    top = jnp.concatenate([first, jnp.zeros_like(corners)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corners, second], axis=-1)], axis=-2)


def _diagonal(blocks):
    """The blocks that `_lower` has joined: [..., n, 2s, 2s] -> [..., 2n, s, s]."""
    s = blocks.shape[-1] // 2
    pairs = jnp.stack([blocks[..., :s, :s], blocks[..., s:, s:]], axis=-3)
    return pairs.reshape(*blocks.shape[:-3], -1, s, s)


def products_vjp(q_cH, k_cH, erase_cH, factors: Decays, ids_c1, d_triangle, d_strict):
    """Gradients to q, erase (as rows), k (as columns) and the sums of log decays inside.

    They come from those of both triangles, [..., c, c]: of `d_triangle` the lower part is read, of
    `d_strict` the strictly lower part. The sums are (near, far) of `Decays`.
    """
    if ids_c1 is not None:
        d_triangle, d_strict = (_in_one_document(x, ids_c1, ids_c1) for x in (d_triangle, d_strict))
    blocks = [x[..., None, :, :] for x in (d_triangle, d_strict)]
    pieces, d_far = [], []
    for to_row, to_border in reversed(factors.far):
        s = to_row.shape[-2]
        columns = _halves(k_cH, s)[0] * to_border
        corners = [block[..., s:, :s] for block in blocks]
        rows = [_halves(x, s)[1] * to_row for x in (q_cH, erase_cH)]
        d_rows = [matmul(corner, columns) for corner in corners]
        d_q, d_e = (matmul(turned(corner), x) for corner, x in zip(corners, rows, strict=True))
        d_columns = d_q + d_e
        d_far.append((rows[0] * d_rows[0] + rows[1] * d_rows[1], columns * d_columns))
        nothing = jnp.zeros_like(columns)
        to_rows = [_join(nothing, d * to_row) for d in d_rows]
        pieces.append((*to_rows, _join(d_columns * to_border, nothing)))
        blocks = [_diagonal(x) for x in blocks]
    *piece, d_near = _near_vjp(q_cH, k_cH, erase_cH, factors, blocks)
    dq, d_erase, dk = (sum(parts) for parts in zip(*pieces, piece, strict=True))
    return dq, d_erase, dk, (d_near, d_far[::-1])


def _near_vjp(q_cH, k_cH, erase_cH, factors: Decays, blocks):
    """The part of `products_vjp` inside blocks, whose gradients are two of [..., c/b, b, b]."""
    parted, own = _parted(blocks[0].shape[-1]), np.eye(blocks[0].shape[-1], dtype=bool)
    columns = _near(k_cH, factors)
    rows = [_near(x, factors) for x in (q_cH, erase_cH)]
    levels = [x[..., None, :, :] for x in blocks]
    d_rows = [matmul(jnp.where(parted, x, 0), columns) for x in levels]
    # transposed before the mask, while it is small
    across = [jnp.where(parted.swapaxes(1, 2), transposed(x), 0) for x in levels]
    d_columns = matmul(across[0], rows[0]) + matmul(across[1], rows[1])
    d_near = rows[0] * d_rows[0] + rows[1] * d_rows[1] + columns * d_columns
    dq, d_erase, dk = (_over_levels(d * factors.near) for d in (*d_rows, d_columns))
    d_own = jnp.sum(jnp.where(own, blocks[0], 0), -1, keepdims=True)
    dq += d_own * _blocks(k_cH)
    dk += d_own * _blocks(q_cH)
    return *(x.reshape(k_cH.shape) for x in (dq, d_erase, dk)), d_near
