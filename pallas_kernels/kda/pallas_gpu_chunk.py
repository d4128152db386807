"""What the GPU kernels compute inside one chunk: its inputs, sums of log decays, pairs, inverse.

A chunk is c rows. Pairs of rows i > j are handled where they are parted when the chunk is halved,
its halves halved, and so on: as in triangle.py, but every halving is one product of all c rows, of
which a mask picks the pairs. Nothing is ever cut out of a value or joined, which Triton cannot do.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu

# Rows whose pairs a bounded gate lets anchor at the first of them: 15 steps of at most 5.4 stay
# below 88, where exp leaves float32.
_BLOCK_LEVEL = 4
_STEEPEST = -5.4


class Form(NamedTuple):
    """What is fixed when a kernel is traced.

    Attributes:
      raw: inputs are those of `kda_fused`; otherwise unit keys, log decays and write strengths.
      lower_bound: of the raw gate; None is the softplus form.
      scale: of the queries.
      length: positions of a row before it was filled up to whole chunks.
    """

    raw: bool
    lower_bound: float | None
    scale: float
    length: int

    @property
    def anchored(self) -> bool:
        """Whether decays inside blocks of 16 rows may be divided by the first row's."""
        return self.raw and self.lower_bound is not None and self.lower_bound >= _STEEPEST

    def levels(self, c: int) -> range:
        """Logarithms of the halves' sizes in rows, those that are not left to anchors."""
        return range(_BLOCK_LEVEL if self.anchored else 0, c.bit_length() - 1)


class Refs(NamedTuple):
    """References of one program to its chunk of the inputs, all columns."""

    q_cH: Any
    k_cH: Any
    v_ch: Any
    gate_cH: Any
    beta_c: Any
    a_log_1: Any
    dt_bias_H: Any
    ids_c: Any
    entry_1: Any  # segment that the chunk's entry state belongs to


class Rows(NamedTuple):
    """What is the same for all channels of a chunk, float32."""

    beta_c: jax.Array
    q_scale_c: jax.Array  # of unit length, and the scale of queries
    k_scale_c: jax.Array
    real_c: jax.Array
    same_cc: jax.Array  # whether rows are of one document


class Channels(NamedTuple):
    """Some channels of a chunk in float32; rows of padding are zero whatever stood there."""

    q_cW: jax.Array  # at unit length, scaled
    k_cW: jax.Array
    write_cW: jax.Array  # beta k, as a key is written
    g_cW: jax.Array


def iotas(c: int) -> tuple[jax.Array, jax.Array]:
    """Row and column numbers of a square."""
    return (
        lax.broadcasted_iota(jnp.int32, (c, c), 0),
        lax.broadcasted_iota(jnp.int32, (c, c), 1),
    )


def real_rows(form: Form, ids_c: jax.Array, first: Any) -> jax.Array:
    """Which rows are neither padding nor behind the end; `first` is the position of row 0."""
    position = first + lax.broadcasted_iota(jnp.int32, ids_c.shape, 0)
    return (ids_c != 0) & (position < form.length)


def load_rows(form: Form, refs: Refs) -> Rows:
    """Of the chunk of program (head, chunk)."""
    ids_c = refs.ids_c[...]
    c = ids_c.shape[0]
    real_c = real_rows(form, ids_c, pl.program_id(1) * c)
    beta_c = jnp.where(real_c, refs.beta_c[...].astype(jnp.float32), 0)
    lengths = [jnp.ones((c,), jnp.float32)] * 2
    if form.raw:
        beta_c = jnp.where(real_c, sigmoid(beta_c), 0)
        lengths = [_inverse_length(rows(x[...], real_c)) for x in (refs.q_cH, refs.k_cH)]
    same_cc = refs.ids_c[...][:, None] == ids_c[None, :]
    return Rows(beta_c, lengths[0] * form.scale, lengths[1], real_c, same_cc)


def load_channels(form: Form, refs: Refs, x: Rows, at: Any) -> Channels:
    """Channels `at` of the chunk."""
    columns = (slice(None), at)
    q_cW = rows(refs.q_cH[columns], x.real_c) * x.q_scale_c[:, None]
    k_cW = rows(refs.k_cH[columns], x.real_c) * x.k_scale_c[:, None]
    g_cW = rows(refs.gate_cH[columns], x.real_c)
    if form.raw:
        g_cW = log_decay(form, g_cW, *gate_weights(refs, at))
        g_cW = jnp.where(x.real_c[:, None], g_cW, 0)
    return Channels(q_cW, k_cW, k_cW * x.beta_c[:, None], g_cW)


def rows(x_cW: jax.Array, real_c: jax.Array) -> jax.Array:
    """In float32, 0 where a row is not real."""
    return jnp.where(real_c[:, None], x_cW.astype(jnp.float32), 0)


def _inverse_length(x_cH: jax.Array) -> jax.Array:
    return lax.rsqrt(jnp.sum(x_cH * x_cH, axis=1) + 1e-6)


def gate_weights(refs: Refs, at: Any) -> tuple[jax.Array, jax.Array]:
    """exp(a_log) and dt_bias [1, W] of the program's head, float32."""
    rate = jnp.exp(refs.a_log_1[0].astype(jnp.float32))
    return rate, refs.dt_bias_H[at].astype(jnp.float32)[None, :]


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + e^-x)."""
    return 1 / (1 + jnp.exp(-x))


def log_decay(form: Form, gate_cW, rate, bias_1W) -> jax.Array:
    """`gates.log_decay` in operations that Triton has."""
    shifted = gate_cW + bias_1W
    if form.lower_bound is not None:
        return form.lower_bound * sigmoid(rate * shifted)
    return -rate * (jnp.maximum(shifted, 0) + jnp.log1p(jnp.exp(-jnp.abs(shifted))))


def log_decay_vjp(form: Form, gate_cW, rate, bias_1W, dg_cW) -> tuple[jax.Array, jax.Array]:
    """Gradients of the raw gate, which are those of the bias too, and by row those of a_log."""
    shifted = gate_cW + bias_1W
    if form.lower_bound is None:
        slope = sigmoid(shifted)
        return -rate * slope * dg_cW, log_decay(form, gate_cW, rate, bias_1W) * dg_cW
    opened = sigmoid(rate * shifted)
    slope = form.lower_bound * rate * opened * (1 - opened) * dg_cW
    return slope, slope * shifted


class Sums:
    """Sums of a chunk's log decays over runs of rows, exact to float32.

    They are products with matrices of 0 and 1. Tensor cores round factors to 8 bits, so each
    log decay goes in as the sum of three numbers of 8 bits.
    """

    def __init__(self, g_cW: jax.Array):
        self.parts = []
        for _ in range(3):
            # by bits: a compiler may take a conversion there and back for nothing
            high = lax.bitcast_convert_type(g_cW, jnp.int32) & jnp.int32(-(1 << 16))
            part = lax.bitcast_convert_type(high, jnp.float32)
            self.parts.append(part.astype(jnp.bfloat16))
            g_cW = g_cW - part

    def over(self, which_cc: jax.Array) -> jax.Array:
        """For each row the sum of those that `which_cc` names."""
        which = which_cc.astype(jnp.float32).astype(jnp.bfloat16)
        high, middle, low = (_gpu.dot(which, part) for part in self.parts)
        return high + (middle + low)


def sums_vjp(which_cc: jax.Array, d_sums_cW: jax.Array, dtype: Any) -> jax.Array:
    """Gradient of the log decays from that of `Sums.over(which_cc)`."""
    which = which_cc.astype(jnp.float32).astype(dtype)
    return _gpu.dot(which, d_sums_cW.astype(dtype), trans_a=True)


def from_start(c: int) -> jax.Array:
    """Rows that a state has decayed through when row i reads it."""
    i, m = iotas(c)
    return m <= i


def to_end(c: int) -> jax.Array:
    """Rows that what row i writes still decays through."""
    i, m = iotas(c)
    return m > i


def to_border(c: int, level: Any) -> jax.Array:
    """Rows between row i and the border of its run of 2 s rows, s = 2^level."""
    i, m = iotas(c)
    second = (i >> level) & 1 == 1
    return ((i >> level) == (m >> level)) & ((second & (m <= i)) | (~second & (m > i)))


def parted(c: int, level: Any) -> jax.Array:
    """Pairs i > j that the border of a run of 2^(level + 1) rows parts."""
    i, j = iotas(c)
    run = (i >> (level + 1)) == (j >> (level + 1))
    return run & ((i >> level) & 1 == 1) & ((j >> level) & 1 == 0)


def from_anchor(c: int) -> jax.Array:
    """Rows after the first of a block of 16, up to row i of it."""
    i, m = iotas(c)
    block = (i >> _BLOCK_LEVEL) == (m >> _BLOCK_LEVEL)
    return block & (m <= i) & (m & ((1 << _BLOCK_LEVEL) - 1) != 0)


def within_anchored(c: int) -> jax.Array:
    """Pairs i > j in one block of 16 rows."""
    i, j = iotas(c)
    return ((i >> _BLOCK_LEVEL) == (j >> _BLOCK_LEVEL)) & (i > j)


def add_triangles(form: Form, x: Channels, sums: Sums, dtype: Any, so_far: Any) -> Any:
    """Adds what these channels give to decayed products of q and of k with written keys, i > j."""
    c = x.g_cW.shape[0]

    def with_keys(to_row, to_column, pairs, so_far):
        columns = (x.write_cW * to_column).astype(dtype)
        products = (
            _gpu.dot((a * to_row).astype(dtype), columns, trans_b=True) for a in (x.q_cW, x.k_cW)
        )
        return tuple(b + jnp.where(pairs, a, 0) for a, b in zip(products, so_far, strict=True))

    def halving(level, so_far):
        decay = jnp.exp(sums.over(to_border(c, level)))
        return with_keys(decay, decay, parted(c, level), so_far)

    levels = form.levels(c)
    so_far = lax.fori_loop(levels.start, levels.stop, halving, so_far)
    if form.anchored:
        span = sums.over(from_anchor(c))
        so_far = with_keys(jnp.exp(span), jnp.exp(-span), within_anchored(c), so_far)
    return so_far


def unit_inverse(strict_cc: jax.Array, exact: bool) -> jax.Array:
    """(I + a strictly lower triangle)^-1, by joining the inverses of halves.

    With X the inverses on the diagonal and P what lies between two halves, X - X P X is the next.
    No power of the triangle is formed: those reach 5e17 where keys are alike, and X stays below 1.
    """
    c = strict_cc.shape[0]
    precise = {"exact": True} if exact else {"nearly_exact": True}
    i, j = iotas(c)
    inverse = jnp.where(i == j, 1.0, 0.0) - jnp.where(parted(c, 0), strict_cc, 0)

    def join(level, inverse):
        between = jnp.where(parted(c, level), strict_cc, 0)
        return inverse - _gpu.dot(inverse, _gpu.dot(between, inverse, **precise), **precise)

    return lax.fori_loop(1, c.bit_length() - 1, join, inverse)
