"""The triangles of one chunk and the inverse, in a GPU kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Form, Refs, Rows


def pairs(form: Form, c: int, level: Any) -> jax.Array:
    """Pairs i > j of one run of 2^(level + 1) rows: all of a block, else those in both its halves.

    `level` is no constant in a kernel, lest a mask for each stay in registers.
    """
    i, j = inside.iotas(c)
    bits = jnp.left_shift(1, level)
    if form.anchored:
        bits = bits | -inside.is_block(level)
    return ((i >> (level + 1)) == (j >> (level + 1))) & ((i & bits) > (j & bits))


def triangles(form: Form, refs: Refs, x: Rows, W: int, dtype: Any) -> tuple[jax.Array, ...]:
    """Decayed products of q, i >= j, and of k, i > j, with written keys, inside documents."""
    c, H = refs.q_cH.shape

    def channels(n, so_far):
        *products, own_c = so_far
        sums = inside.Sums(
            refs, n, inside.load_log_decay(form, refs, x, inside.channels_of(refs, n, W))
        )

        def add(level, so_far):
            q_cW, k_cW = inside.load_keys(refs, x, inside.channels_of(refs, n, W, level))
            to_row, to_column = inside.decays_of_pairs(form, sums, level)
            columns = (x.beta_c[:, None] * k_cW * to_column).astype(dtype)
            which = pairs(form, c, level)
            more = (
                _gpu.dot((a * to_row).astype(dtype), columns, trans_b=True) for a in (q_cW, k_cW)
            )
            return tuple(b + jnp.where(which, a, 0) for a, b in zip(more, so_far, strict=True))

        levels = form.levels(c)
        products = lax.fori_loop(levels.start, levels.stop, add, tuple(products))
        q_cW, k_cW = inside.load_keys(refs, x, inside.channels_of(refs, n, W))
        return *products, own_c + x.beta_c * jnp.sum(q_cW * k_cW, axis=1)

    square = jnp.zeros((c, c), jnp.float32)
    nothing = (square, square, jnp.zeros((c,), jnp.float32))
    *products, own_c = lax.fori_loop(0, H // W, channels, nothing)
    scores_cc, strict_cc = (inside.in_one_document(refs, a) for a in products)
    i, j = inside.iotas(c)
    return jnp.where(i == j, own_c[:, None], scores_cc), strict_cc


def unit_inverse(strict_cc: jax.Array, exact: bool) -> jax.Array:
    """(I + a strictly lower triangle)^-1, by joining the inverses of halves.

    With X the inverses on the diagonal and P what lies between two halves, X - X P X is the next.
    No power of the triangle is formed: those reach 5e17 where keys are alike, and X stays below 1.
    """
    c = strict_cc.shape[0]
    precise = {"exact": True} if exact else {"nearly_exact": True}
    i, j = inside.iotas(c)

    def join(level, inverse):
        halves = ((i >> (level + 1)) == (j >> (level + 1))) & ((i >> level) > (j >> level))
        between = jnp.where(halves, strict_cc, 0)
        return inverse - _gpu.dot(inverse, _gpu.dot(between, inverse, **precise), **precise)

    return lax.fori_loop(0, c.bit_length() - 1, join, jnp.where(i == j, 1.0, 0.0))
