"""What one program of the kernels of linear_xent does."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.linear_xent.tiles import Tiles


class Sizes(NamedTuple):
    """All that is static."""

    tiles: Tiles
    num_rows: int
    num_vocab: int
    width: int
    ignore: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.num_rows, self.tiles.rows)

    @property
    def vocab_tiles(self) -> int:
        return pl.cdiv(self.num_vocab, self.tiles.vocab)

    @property
    def width_tiles(self) -> int:
        return pl.cdiv(self.width, self.tiles.width)

    def columns(self, d):
        """Part d of the width, and where there is such."""
        start = d * self.tiles.width
        column_d = start + jnp.arange(self.tiles.width, dtype=jnp.int32)
        return pl.ds(start, self.tiles.width), (column_d < self.width)[None, :]


def _rows(sizes, labels_ref, tile):
    """Where some rows lie, their labels, and which of them count."""
    size = sizes.tiles.rows
    rows = pl.ds(tile * size, size)
    there_n = tile * size + jnp.arange(size, dtype=jnp.int32) < sizes.num_rows
    labels_n = _gpu.load(labels_ref.at[rows], there_n)
    return rows, there_n, labels_n, there_n & (labels_n != sizes.ignore)


def _vocab(sizes, tile):
    """Where some vocabulary entries lie, their numbers, and which of them there are."""
    size = sizes.tiles.vocab
    column_v = tile * size + jnp.arange(size, dtype=jnp.int32)
    return pl.ds(tile * size, size), column_v, column_v < sizes.num_vocab


def _logits(sizes, x_ref, weight_ref, rows, real_n, vocab, real_v):
    """A tile of logits; 0 in rows that do not count, whatever x holds there."""

    def step(d, sum_nv):
        columns, real_d = sizes.columns(d)
        x_nd = _gpu.load(x_ref.at[rows, columns], real_n[:, None] & real_d)
        weight_vd = _gpu.load(weight_ref.at[vocab, columns], real_v[:, None] & real_d)
        return sum_nv + _gpu.dot(x_nd, weight_vd, trans_b=True)

    zeros_nv = jnp.zeros((sizes.tiles.rows, sizes.tiles.vocab), jnp.float32)
    logits_nv = lax.fori_loop(0, sizes.width_tiles, step, zeros_nv)
    if sizes.soft_cap is not None:
        logits_nv = sizes.soft_cap * jnp.tanh(logits_nv / sizes.soft_cap)
    return logits_nv


def stats_body(sizes, x_ref, weight_ref, labels_ref, max_ref, sum_ref, label_ref, total_ref):
    """Online softmax of some rows over one part of the vocabulary."""
    split = pl.program_id(1)
    rows, there_n, labels_n, real_n = _rows(sizes, labels_ref, pl.program_id(0))
    share = pl.cdiv(sizes.vocab_tiles, sizes.tiles.splits)
    first = split * share
    count = jnp.maximum(jnp.minimum(share, sizes.vocab_tiles - first), 0)

    def see(i, stats):
        max_n, sum_n, label_n, total_n = stats
        vocab, column_v, real_v = _vocab(sizes, first + i)
        logits_nv = _logits(sizes, x_ref, weight_ref, rows, real_n, vocab, real_v)
        is_label_nv = column_v[None, :] == labels_n[:, None]
        label_n += jnp.sum(jnp.where(is_label_nv, logits_nv, 0), axis=1)
        if sizes.label_smoothing:
            total_n += jnp.sum(jnp.where(real_v[None, :], logits_nv, 0), axis=1)
        logits_nv = jnp.where(real_v[None, :], logits_nv, -1e30)
        new_max_n = jnp.maximum(max_n, jnp.max(logits_nv, axis=1))
        part_n = jnp.sum(jnp.exp(logits_nv - new_max_n[:, None]), axis=1)
        return new_max_n, sum_n * jnp.exp(max_n - new_max_n) + part_n, label_n, total_n

    zeros_n = jnp.zeros(sizes.tiles.rows, jnp.float32)
    stats = lax.fori_loop(0, count, see, (zeros_n - 1e30, zeros_n, zeros_n, zeros_n))
    for ref, value_n in zip((max_ref, sum_ref, label_ref, total_ref), stats, strict=True):
        _gpu.store(ref.at[pl.ds(split, 1), rows], value_n[None, :], there_n[None, :])


def grad_body(sizes, want_x, want_weight, x_ref, weight_ref, labels_ref, lse_ref, *refs):
    """Adds a tile's share to dx and dW."""
    sums = list(refs[len(refs) // 2 :])  # the first half is the zeros that they share memory with
    dx_ref = sums.pop(0) if want_x else None
    d_weight_ref = sums.pop(0) if want_weight else None
    rows, there_n, labels_n, real_n = _rows(sizes, labels_ref, pl.program_id(0))
    vocab, column_v, real_v = _vocab(sizes, pl.program_id(1))
    logits_nv = _logits(sizes, x_ref, weight_ref, rows, real_n, vocab, real_v)
    lse_n = _gpu.load(lse_ref.at[rows], there_n)
    g_nv = _d_logits(sizes, logits_nv, lse_n, labels_n, column_v)
    g_nv = jnp.where(real_n[:, None] & real_v[None, :], g_nv, 0).astype(x_ref.dtype)

    def push_x(d, _):
        columns, real_d = sizes.columns(d)
        weight_vd = _gpu.load(weight_ref.at[vocab, columns], real_v[:, None] & real_d)
        _gpu.add(dx_ref, (rows, columns), _gpu.dot(g_nv, weight_vd), there_n[:, None] & real_d)

    def push_weight(d, _):
        columns, real_d = sizes.columns(d)
        x_nd = _gpu.load(x_ref.at[rows, columns], real_n[:, None] & real_d)
        d_weight_vd = _gpu.dot(g_nv, x_nd, trans_a=True)
        _gpu.add(d_weight_ref, (vocab, columns), d_weight_vd, real_v[:, None] & real_d)

    # one after the other: the sums of both at once do not fit the registers
    for wanted, push in ((want_x, push_x), (want_weight, push_weight)):
        if wanted:
            lax.fori_loop(0, sizes.width_tiles, push, None)


def _d_logits(sizes, logits_nv, lse_n, labels_n, column_v):
    """Gradient of the loss to the logits before their cap."""
    p_nv = jnp.exp(logits_nv - lse_n[:, None])
    g_nv = p_nv * (1 + 2 * sizes.z_loss * lse_n)[:, None]
    is_label_nv = column_v[None, :] == labels_n[:, None]
    g_nv -= jnp.where(is_label_nv, jnp.float32(1 - sizes.label_smoothing), 0)
    if sizes.label_smoothing:
        g_nv -= sizes.label_smoothing / sizes.num_vocab
    if sizes.soft_cap is not None:
        g_nv *= 1 - (logits_nv / sizes.soft_cap) ** 2
    return g_nv
