"""KDA's kernels on a TPU: a few chunks of one head a step, the state in on-chip memory.

States are held as S' [h, H], so that a channel's decay scales a lane.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.kda import pallas_tpu_chunk as tile
from pallas_kernels.kda.pallas_tpu_chunk import Decays, Document


class Sizes(NamedTuple):
    """What the kernels are specialised on.

    Attributes:
      chunk: positions in a chunk.
      rows: chunks a step.
      steps: along a row.
      group: value heads that share a key head.
      scale: of the queries.
      raw: whether inputs are those of `kda_fused`, else those of `kda`.
      lower_bound: of the log decay; None is the softplus form.
      dtype: of the products.
      out_dtype: of the output.
    """

    chunk: int
    rows: int
    steps: int
    group: int
    scale: float
    raw: bool
    lower_bound: float | None
    dtype: Any
    out_dtype: Any


class Inputs(NamedTuple):
    """References to what both directions read; P = rows c positions of a step."""

    q: Any  # [1, P, H]
    k: Any
    v: Any  # [1, P, h]
    gate: Any  # [1, P, H], or log decay
    beta: Any  # [1, 1, 1, rows, c], or its logits
    head: Any  # [1, 2, H]: dt_bias, exp(a_log); None where inputs are not raw
    code: Any  # [1, 1, rows, c] of `pallas_tpu.document_codes`, or None

    def chunk(self, j, sizes: "Sizes") -> "Inputs":
        """Those of chunk `j` of the step: [c, H], [c, h], [1, c]."""
        q, k, v, gate = (_positions(x, j, sizes) for x in self[:4])
        code = None if self.code is None else self.code.at[0, 0, pl.ds(j, 1)]
        return Inputs(q, k, v, gate, self.beta.at[0, 0, 0, pl.ds(j, 1)], self.head, code)


class Kept(NamedTuple):
    """References to what the forward pass leaves to the backward pass."""

    entry: Any  # [1, 1, rows, h, H], the state at the start of each chunk
    triangles: Any  # [1, 1, rows, c, 2 c]: scores, inverse

    def chunk(self, j) -> "Kept":
        """That of chunk `j` of the step: [h, H], [c, 2 c]."""
        return Kept(self.entry.at[0, 0, j], self.triangles.at[0, 0, j])


class Grads(NamedTuple):
    """References to gradients; blocks as those of `Inputs`."""

    q: Any
    k: Any
    v: Any
    gate: Any
    beta: Any
    head: Any  # [1, 1, 2, H]: of dt_bias, of exp(a_log) by channel; summed over chunks
    initial: Any  # [1, 1, h, H], the gradient that goes from chunk to chunk

    def chunk(self, j, sizes: "Sizes") -> "Grads":
        """Those of chunk `j` of the step."""
        q, k, v, gate = (_positions(x, j, sizes) for x in self[:4])
        beta = self.beta.at[0, 0, 0, pl.ds(j, 1)]
        return Grads(q, k, v, gate, beta, self.head, self.initial)


def _positions(ref, j, sizes):
    return ref.at[0, pl.ds(pl.multiple_of(j * sizes.chunk, sizes.chunk), sizes.chunk)]


class Gate(NamedTuple):
    """What the log decay comes from: gate + dt_bias, the sigmoid in it or of it, the softplus."""

    shifted_cH: jax.Array
    sigmoid_cH: jax.Array
    softplus_cH: jax.Array | None


class Chunk(NamedTuple):
    """All of a chunk that needs no state; float32 except where products read it."""

    where: Document | None
    q_cH: jax.Array  # at unit length times scale
    k_cH: jax.Array
    v_ch: jax.Array
    q_norm_c1: jax.Array | None  # 1 / length
    k_norm_c1: jax.Array | None
    gate: Gate | None
    beta_c1: jax.Array
    factors: Decays
    from_start_cH: jax.Array  # 0 in later documents
    to_end_cH: jax.Array  # 0 in earlier documents
    carry_1H: jax.Array  # from the entry state to the exit state
    scores_cc: jax.Array
    inverse_cc: jax.Array


def _unit(x_cH, raw):
    if not raw:
        return x_cH, None
    norm_c1 = lax.rsqrt(jnp.sum(x_cH * x_cH, axis=1, keepdims=True) + 1e-6)
    return x_cH * norm_c1, norm_c1


def _log_decay(gate_cH, head_2H, lower_bound):
    shifted, rate_1H = gate_cH + head_2H[:1], head_2H[1:]
    if lower_bound is None:
        softplus = jnp.maximum(shifted, 0) + jnp.log1p(jnp.exp(-jnp.abs(shifted)))
        return -rate_1H * softplus, Gate(shifted, jax.nn.sigmoid(shifted), softplus)
    sigmoid = jax.nn.sigmoid(rate_1H * shifted)
    return lower_bound * sigmoid, Gate(shifted, sigmoid, None)


def load(inputs: Inputs, sizes: Sizes, kept: Kept | None = None) -> Chunk:
    """Reads a chunk and computes what needs no state and has not been kept."""
    where = None if inputs.code is None else tile.document(inputs.code[...])
    real_c1 = None if where is None else where.real_c1

    def read(ref):
        x = ref[...].astype(jnp.float32)
        return x if real_c1 is None else jnp.where(real_c1, x, 0)

    (q, q_norm), (k, k_norm) = (_unit(read(ref), sizes.raw) for ref in (inputs.q, inputs.k))
    q, g, beta, gate = q * sizes.scale, read(inputs.gate), inputs.beta[...], None
    if sizes.raw:
        g, gate = _log_decay(g, inputs.head[0], sizes.lower_bound)
        g = g if real_c1 is None else jnp.where(real_c1, g, 0)
        beta = jax.nn.sigmoid(beta)
    beta = tile.column(beta)
    factors = tile.decays(g)
    from_start, to_end, carry = factors.from_start, factors.to_end, factors.from_start[-1:]
    if where is not None:
        beta = jnp.where(where.real_c1, beta, 0)
        from_start = jnp.where(where.reads_entry_c1, from_start, 0)
        to_end = jnp.where(where.reaches_exit_c1, to_end, 0)
        carry = jnp.where(where.passes_11, carry, 0)
    if kept is None:
        same = None if where is None else where.same_cc
        scores, strict = tile.products(q, beta * k, k, factors, same, sizes.dtype)
        scores, inverse = (x.astype(sizes.dtype) for x in (scores, tile.inverse(strict)))
    else:
        triangles = kept.triangles[...]
        scores, inverse = triangles[:, : sizes.chunk], triangles[:, sizes.chunk :]
    return Chunk(
        where, q, k, read(inputs.v), q_norm, k_norm, gate, beta, factors, from_start, to_end,
        carry, scores, inverse,
    )  # fmt: skip


def _error_and_written(x: Chunk, state_hH, dtype):
    """What the memory gets wrong at every key, and what is written for it; [c, h] float32."""
    k_in = (x.k_cH * x.from_start_cH).astype(dtype)
    error = x.v_ch - _tpu.dot(k_in, state_hH, trans_b=True, exact=True)
    return error, _tpu.dot(x.inverse_cc, (x.beta_c1 * error).astype(dtype), exact=True)


def forward(inputs: Inputs, initial, out, final, keep: Kept | None, sizes: Sizes) -> None:
    """A step forwards: `final` is the state that goes from chunk to chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        final[...] = initial[...]

    def chunk(j, _):
        kept = None if keep is None else keep.chunk(j)
        _forward_chunk(inputs.chunk(j, sizes), _positions(out, j, sizes), final, kept, sizes)

    lax.fori_loop(0, sizes.rows, chunk, None)


def _forward_chunk(inputs: Inputs, out, final, keep: Kept | None, sizes: Sizes) -> None:
    dtype = sizes.dtype
    x, state_hH = load(inputs, sizes), final[0, 0]
    entry_hH = state_hH.astype(dtype)
    if keep is not None:
        keep.entry[...] = entry_hH
        keep.triangles[...] = jnp.concatenate([x.scores_cc, x.inverse_cc], axis=1)
    _, written = _error_and_written(x, entry_hH, dtype)
    written = written.astype(dtype)
    q_in, k_out = (x.q_cH * x.from_start_cH).astype(dtype), (x.k_cH * x.to_end_cH).astype(dtype)
    read = _tpu.dot(q_in, entry_hH, trans_b=True, exact=True)
    out[...] = (read + _tpu.dot(x.scores_cc, written, exact=True)).astype(out.dtype)
    final[0, 0] = x.carry_1H * state_hH + _tpu.dot(written, k_out, trans_a=True, exact=True)


def backward(inputs: Inputs, kept: Kept, d_out, d_final, d: Grads, sizes: Sizes) -> None:
    """A step backwards: `d.initial` goes from chunk to chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        d.initial[...] = d_final[...]
        if sizes.raw:
            d.head[...] = jnp.zeros(d.head.shape, jnp.float32)

    def chunk(t, _):
        j = sizes.rows - 1 - t
        d_out_of = _positions(d_out, j, sizes)
        _backward_chunk(inputs.chunk(j, sizes), kept.chunk(j), d_out_of, d.chunk(j, sizes), sizes)

    lax.fori_loop(0, sizes.rows, chunk, None)


def _backward_chunk(inputs: Inputs, kept: Kept, d_out, d: Grads, sizes: Sizes) -> None:
    dtype = sizes.dtype
    x, entry_hH, d_out_ch = load(inputs, sizes, kept), kept.entry[...], d_out[...].astype(dtype)
    if x.where is not None:
        d_out_ch = jnp.where(x.where.real_c1, d_out_ch, jnp.zeros_like(d_out_ch))
    d_exit_hH = d.initial[0, 0]
    error, written = _error_and_written(x, entry_hH, dtype)
    written = written.astype(dtype)

    q_in, k_in, k_out = x.q_cH * x.from_start_cH, x.k_cH * x.from_start_cH, x.k_cH * x.to_end_cH
    d_exit_low = d_exit_hH.astype(dtype)
    d_written = _tpu.dot(x.scores_cc, d_out_ch, trans_a=True, exact=True)
    d_written += _tpu.dot(k_out.astype(dtype), d_exit_low, trans_b=True, exact=True)
    d_solved = _tpu.dot(x.inverse_cc, d_written.astype(dtype), trans_a=True, exact=True)
    dv = x.beta_c1 * d_solved
    d.v[...] = dv.astype(d.v.dtype)

    c = sizes.chunk
    d_both = tile.stack(d_out_ch, -dv.astype(dtype))  # of what q_in and k_in read
    both = tile.stack(q_in.astype(dtype), k_in.astype(dtype))
    d.initial[0, 0] = x.carry_1H * d_exit_hH + _tpu.dot(d_both, both, trans_a=True, exact=True)
    d_in = _tpu.dot(d_both, entry_hH, exact=True)
    d_q_in, d_k_in = d_in[:c], d_in[c:]
    d_k_out = _tpu.dot(written, d_exit_low, exact=True)

    d_pairs = tile.stack(d_out_ch, -d_solved.astype(dtype))
    d_pairs = _tpu.dot(d_pairs, written, trans_b=True, exact=True)
    if x.where is not None:
        same = x.where.same_cc
        d_pairs = tile.stack(*(jnp.where(same, half, 0) for half in (d_pairs[:c], d_pairs[c:])))
    dq, d_erase, dk, d_near = tile.products_vjp(
        x.q_cH, x.beta_c1 * x.k_cH, x.k_cH, x.factors, d_pairs, dtype
    )
    dq += x.from_start_cH * d_q_in
    dk += x.beta_c1 * d_erase + x.from_start_cH * d_k_in + x.to_end_cH * d_k_out
    d_beta = jnp.sum(d_solved * error, axis=1, keepdims=True)
    d_beta += jnp.sum(d_erase * x.k_cH, axis=1, keepdims=True)

    # a decay multiplies a row y, so the sum in its exponent receives y * dy
    d_start = k_in * d_k_in + q_in * d_q_in
    d_carry = x.carry_1H * jnp.sum(entry_hH.astype(jnp.float32) * d_exit_hH, axis=0, keepdims=True)
    d_start += jnp.where(tile.rows_of(d_start.shape) == c - 1, d_carry, 0)
    dg = tile.sums_vjp(Decays(d_near, d_start, k_out * d_k_out))
    if x.where is not None:
        dg = jnp.where(x.where.real_c1, dg, 0)
        d_beta = jnp.where(x.where.real_c1, d_beta, 0)
    dq *= sizes.scale
    if x.gate is not None:
        dq = _unit_vjp(x.q_cH * (1 / sizes.scale), x.q_norm_c1, dq)
        dk = _unit_vjp(x.k_cH, x.k_norm_c1, dk)
        dg, d_rate = _log_decay_vjp(x.gate, inputs.head[0][1:], sizes.lower_bound, dg)
        d.head[0, 0] += tile.stack(*(jnp.sum(y, axis=0, keepdims=True) for y in (dg, d_rate)))
        d_beta *= x.beta_c1 * (1 - x.beta_c1)
    for ref, grad in ((d.q, dq), (d.k, dk), (d.gate, dg)):
        ref[...] = grad.astype(ref.dtype)
    d.beta[...] = tile.row(d_beta)


def _unit_vjp(unit_cH, norm_c1, d_unit_cH):
    along_c1 = jnp.sum(unit_cH * d_unit_cH, axis=1, keepdims=True)
    return norm_c1 * (d_unit_cH - unit_cH * along_c1)


def _log_decay_vjp(gate: Gate, rate_1H, lower_bound, dg_cH):
    """Gradients to the gate and, at every position, to exp(a_log)."""
    if gate.softplus_cH is not None:
        return -rate_1H * gate.sigmoid_cH * dg_cH, -gate.softplus_cH * dg_cH
    d_scaled = lower_bound * gate.sigmoid_cH * (1 - gate.sigmoid_cH) * dg_cH
    return rate_1H * d_scaled, gate.shifted_cH * d_scaled
