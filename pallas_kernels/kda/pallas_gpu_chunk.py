"""What all GPU kernels compute inside one chunk: its inputs, sums of log decays, decays of pairs.

A chunk is c rows. Pairs of rows i > j are handled where they are parted when the chunk is halved,
its halves halved, and so on: as in triangle.py, but every halving is one product of all c rows, of
which a mask picks the pairs. Nothing is ever cut out of a value or joined, which Triton cannot do.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu

# 16 rows are a block, whose pairs may anchor at the first of them where the gate is bounded: 15
# steps of at most 5.4 stay below 88, where exp leaves float32.
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
        """Logarithms of the halves' sizes in rows; the first is that of blocks where `anchored`."""
        return range(_BLOCK_LEVEL - 1 if self.anchored else 0, c.bit_length() - 1)


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
    runs_K2cc: Any  # `runs`
    zero_S: Any  # zeros


class Rows(NamedTuple):
    """What is the same for all channels of a chunk, float32."""

    beta_c: jax.Array
    q_scale_c: jax.Array  # of unit length, and the scale of queries
    k_scale_c: jax.Array
    real_c: jax.Array


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
    return Rows(beta_c, lengths[0] * form.scale, lengths[1], real_c)


def in_one_document(refs: Refs, a_cc: jax.Array) -> jax.Array:
    """Pairs of rows of two documents made 0."""
    return jnp.where(refs.ids_c[...][:, None] == refs.ids_c[...][None, :], a_cc, 0)


def channels_of(refs: Refs, n: Any, W: int, level: Any = 0) -> Any:
    """Channels of step n. A zero from memory makes them unknown before the loop over `level`.

    So a compiler does not load what is there before the loop, in every layout that the loop needs:
    that would take most registers.
    """
    return pl.ds(n * W + pl.multiple_of(refs.zero_S[level], W), W)


def later(refs: Refs, triangle_cc: Any, level: Any) -> jax.Array:
    """A triangle from memory, at a place that is unknown before the loop over `level`."""
    c = triangle_cc.shape[0]
    return triangle_cc[pl.ds(pl.multiple_of(refs.zero_S[level], c), c), :]


def load_keys(refs: Refs, x: Rows, at: Any) -> tuple[jax.Array, jax.Array]:
    """Queries, scaled, and keys at unit length; rows of padding are zero whatever stood there."""
    columns = (slice(None), at)
    q_cW = rows(refs.q_cH[columns], x.real_c) * x.q_scale_c[:, None]
    return q_cW, rows(refs.k_cH[columns], x.real_c) * x.k_scale_c[:, None]


def load_log_decay(form: Form, refs: Refs, x: Rows, at: Any) -> jax.Array:
    """Log decays, 0 at padding."""
    g_cW = rows(refs.gate_cH[:, at], x.real_c)
    if not form.raw:
        return g_cW
    return jnp.where(x.real_c[:, None], log_decay(form, g_cW, *gate_weights(refs, at)), 0)


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
    # 1 - sigmoid(x) would lose all digits where the gate is nearly at its bound
    opened, closed = sigmoid(rate * shifted), sigmoid(-rate * shifted)
    slope = form.lower_bound * rate * opened * closed * dg_cW
    return slope, slope * shifted


FROM_START, TO_END, TO_BORDER = range(3)  # places in `runs`; the last is that of level 0


def runs(form: Form, c: int) -> np.ndarray:
    """Runs of rows whose log decays are summed, for each row i one row of 0 and 1; [K, 2, c, c].

    FROM_START: those that a state has decayed through when row i reads it; TO_END: those that what
    row i writes still decays through; TO_BORDER + level: those between row i and the border of its
    run of 2^(level + 1) rows, or, where blocks are anchored, after the block's first row up to i.
    Behind them, for each level, `pairs`. Each matrix is followed by its transpose.

    They come from memory: made in the kernel, each would stay in registers.
    """
    i, m = np.ogrid[:c, :c]
    kinds = [m <= i, m > i]
    for level in range(c.bit_length() - 1):
        s = 1 << level
        second = i // s % 2 == 1
        kinds.append((i // s == m // s) & np.where(second, m <= i, m > i))
    if form.anchored:
        b = 1 << _BLOCK_LEVEL
        anchored = (i // b == m // b) & (m <= i) & (m % b != 0)
        kinds[TO_BORDER + form.levels(c).start] = anchored
    for level in range(c.bit_length() - 1):
        bits = -1 if form.anchored and level < _BLOCK_LEVEL else 1 << level
        kinds.append((i >> (level + 1) == m >> (level + 1)) & (i & bits > m & bits))
    return np.stack([[kind, kind.T] for kind in kinds])


def _parts(x_cW: jax.Array, count: int) -> list[jax.Array]:
    """Numbers of 8 bits whose sum is `x_cW` where there are three of them, each bfloat16."""
    parts = []
    for _ in range(count):
        # by bits: a compiler may take a conversion there and back for nothing
        high = lax.bitcast_convert_type(x_cW, jnp.int32) & jnp.int32(-(1 << 16))
        part = lax.bitcast_convert_type(high, jnp.float32)
        parts.append(part.astype(jnp.bfloat16))
        x_cW = x_cW - part
    return parts


def _product(run_cc: jax.Array, parts: list[jax.Array]) -> jax.Array:
    products = [_gpu.dot(run_cc, part) for part in reversed(parts)]
    return functools.reduce(jnp.add, products)  # the smallest first


class Sums:
    """Sums of a chunk's log decays over runs of rows, exact to float32.

    They are products with matrices of 0 and 1. Tensor cores round factors to 8 bits, so each
    log decay goes in as the sum of three numbers of 8 bits.
    """

    def __init__(self, refs: Refs, n: Any, g_cW: jax.Array):
        self._runs, self._zero = refs.runs_K2cc, refs.zero_S[n]
        self._parts = _parts(g_cW, 3)

    def over(self, kind: Any) -> jax.Array:
        """For each row the sum over its run of that kind."""
        run_cc = self._runs[kind + self._zero, 0]
        return _product(run_cc, self._parts)

    def vjp(self, kind: Any, d_sums_cW: jax.Array, dtype: Any) -> jax.Array:
        """Gradient of the log decays from that of `over(kind)`, for inputs of `dtype`.

        With bfloat16, 16 bits: with 8, sums in which terms cancel would lose what is left.
        """
        count = 3 if dtype == jnp.float32 else 2
        return _product(self._runs[kind + self._zero, 1], _parts(d_sums_cW, count))

    def pairs(self, c: int, level: Any, transposed: int, d_cc: jax.Array) -> jax.Array:
        """The part of a triangle, or of its transpose, that belongs to one level."""
        which = self._runs[TO_BORDER + c.bit_length() - 1 + level + self._zero, transposed]
        return d_cc * which.astype(d_cc.dtype)


def decays_of_pairs(form: Form, sums: Sums, level: Any) -> tuple[jax.Array, jax.Array]:
    """Factors of rows i and of columns j of the pairs of one level."""
    span = sums.over(TO_BORDER + level)
    to_row = jnp.exp(span)
    if not form.anchored:
        return to_row, to_row
    return to_row, jnp.exp(sign_of_columns(form, level) * span)


def sign_of_columns(form: Form, level: Any) -> Any:
    """-1 where the decay of a row divides its column, at anchored blocks, else 1."""
    return (1 - 2 * is_block(level)).astype(jnp.float32) if form.anchored else 1.0


def is_block(level: Any) -> jax.Array:
    """1 for the first level where blocks are anchored, else 0; Triton selects no numbers."""
    return jnp.maximum(_BLOCK_LEVEL - jnp.int32(level), 0)
