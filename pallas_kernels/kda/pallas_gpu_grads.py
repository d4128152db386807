"""GPU kernel, last stage of the gradient: from states and their gradients to all inputs of a chunk.

README.md has the maths. Every decay multiplies a row y, so the sum in its exponent gets y * dy; the
gradient of a log decay is the sum over the runs of rows it is part of, where nothing large cancels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Chunk, Form, Refs
from pallas_kernels.kda.pallas_gpu_prep import Blocks, Inputs, state_decays
from pallas_kernels.kda.tiles import Tiles


class Grads(NamedTuple):
    """Gradients by value head; of a_log and dt_bias a share for each chunk and channel."""

    q_BPNH: jax.Array
    k_BPNH: jax.Array
    v_BPNh: jax.Array
    gate_BPNH: jax.Array
    beta_BPN: jax.Array
    a_log_GCH: jax.Array
    dt_bias_GCH: jax.Array


class _Saved(NamedTuple):
    """References of one program to what earlier kernels have left."""

    inverse_cc: Any
    entry_Hh: Any
    d_exit_Hh: Any
    d_written_ch: Any
    d_out_ch: Any


def gradients(
    form: Form, x: Inputs, inverse_GPc, entries_GCHh, d_exits_GCHh, d_written_GPh, d_out_BPNh,
    tiles: Tiles,
) -> Grads:  # fmt: skip
    """Gradients of the inputs from those of what is written, of the exit states, of the output."""
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    (G, C), H, h = blocks.grid, blocks.H, blocks.h
    tokens = (*x.v_BPNh.shape[:3], H)

    def body(*refs):
        saved = _Saved(*refs[len(x) : len(x) + 5])
        _gradients(form, tiles, dtype, Refs(*refs[: len(x)]), saved, Grads(*refs[len(x) + 5 :]))

    outs = _gpu.call(
        body, name="kda_grads", grid=blocks.grid,
        in_specs=[
            *blocks.inputs(), blocks.chunk(tiles.chunk), blocks.one(H, h), blocks.one(H, h),
            blocks.chunk(h), blocks.tokens(h),
        ],
        out_specs=[
            blocks.tokens(H), blocks.tokens(H), blocks.tokens(h), blocks.tokens(H),
            blocks.scalars(), blocks.one(H), blocks.one(H),
        ],
        out_shape=[
            jax.ShapeDtypeStruct(tokens, x.q_BPNH.dtype),
            jax.ShapeDtypeStruct(tokens, x.k_BPNH.dtype),
            jax.ShapeDtypeStruct(x.v_BPNh.shape, x.v_BPNh.dtype),
            jax.ShapeDtypeStruct(tokens, x.gate_BPNH.dtype),
            jax.ShapeDtypeStruct(x.beta_BPN.shape, x.beta_BPN.dtype),
            *[jax.ShapeDtypeStruct((G, C, H), jnp.float32)] * 2,
        ],
        warps=tiles.grads_warps, stages=tiles.stages,
    )(*x, inverse_GPc, entries_GCHh, d_exits_GCHh, d_written_GPh, d_out_BPNh)  # fmt: skip
    return Grads(*outs)


class _Through(NamedTuple):
    """Gradients that came through the state and the triangles, summed over columns of values."""

    k_in_cH: jax.Array  # of keys and queries as they meet the entry state
    q_in_cH: jax.Array
    k_out_cH: jax.Array  # of keys as they reach the exit state
    scores_cc: jax.Array
    strict_cc: jax.Array
    beta_c: jax.Array
    carry_H: jax.Array


def _gradients(form: Form, tiles: Tiles, dtype: Any, refs: Refs, saved: _Saved, outs: Grads):
    x = inside.load(form, refs)
    c = tiles.chunk
    sums = inside.Sums(x.g_cH)
    from_start_cH, to_end_cH, carry_H = state_decays(refs, x, sums, c)
    k_in, q_in, k_out = x.k_cH * from_start_cH, x.q_cH * from_start_cH, x.k_cH * to_end_cH
    through = _through_values(refs, saved, outs, x, k_in.astype(dtype), tiles)
    dq, dk = from_start_cH * through.q_in_cH, from_start_cH * through.k_in_cH
    dk += to_end_cH * through.k_out_cH
    d_start = k_in * through.k_in_cH + q_in * through.q_in_cH
    dg = inside.sums_vjp(inside.from_start(c), d_start, dtype)
    dg += inside.sums_vjp(inside.to_end(c), k_out * through.k_out_cH, dtype)
    dg += (carry_H * through.carry_H)[None, :]
    pairs = _through_pairs(form, x, sums, through, dtype, (dq, dk, dg, through.beta_c))
    _write(form, refs, outs, x, *pairs)


def _through_values(refs: Refs, saved: _Saved, outs: Grads, x: Chunk, k_in, tiles: Tiles):
    """Loop over the columns of values and state; writes the gradient of the values."""
    c, H, dtype = tiles.chunk, k_in.shape[1], k_in.dtype
    inverse_cc = saved.inverse_cc[...]

    def step(n, so_far: _Through) -> _Through:
        at = (slice(None), pl.ds(pl.multiple_of(n * tiles.columns, tiles.columns), tiles.columns))
        entry, d_exit = saved.entry_Hh[at], saved.d_exit_Hh[at]
        d_out = inside.rows(saved.d_out_ch[at], x.real_c).astype(dtype)
        error = inside.rows(refs.v_ch[at], x.real_c) - _gpu.dot(k_in, entry)
        written = _gpu.dot(inverse_cc, (x.beta_c[:, None] * error).astype(dtype)).astype(dtype)
        d_solved = _gpu.dot(inverse_cc, saved.d_written_ch[at], trans_a=True)
        dv = x.beta_c[:, None] * d_solved
        outs.v_BPNh[at] = dv.astype(outs.v_BPNh.dtype)
        dv, d_beta = dv.astype(dtype), jnp.sum(d_solved * error, axis=1)
        carry = jnp.sum(entry.astype(jnp.float32) * d_exit.astype(jnp.float32), axis=1)
        return _Through(
            so_far.k_in_cH - _gpu.dot(dv, entry, trans_b=True),
            so_far.q_in_cH + _gpu.dot(d_out, entry, trans_b=True),
            so_far.k_out_cH + _gpu.dot(written, d_exit, trans_b=True),
            so_far.scores_cc + _gpu.dot(d_out, written, trans_b=True),
            so_far.strict_cc - _gpu.dot(d_solved.astype(dtype), written, trans_b=True),
            so_far.beta_c + d_beta,
            so_far.carry_H + carry,
        )

    shapes = ((c, H), (c, H), (c, H), (c, c), (c, c), (c,), (H,))
    nothing = _Through(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
    return lax.fori_loop(0, outs.v_BPNh.shape[1] // tiles.columns, step, nothing)


def _through_pairs(form: Form, x: Chunk, sums, through: _Through, dtype, so_far):
    """Adds to (dq, dk, dg, d_beta) what comes back through the triangles."""
    c = x.g_cH.shape[0]
    i, j = inside.iotas(c)
    d_scores, d_strict = (
        jnp.where(x.same_cc, d, 0) for d in (through.scores_cc, through.strict_cc)
    )
    d_own = jnp.sum(jnp.where(i == j, d_scores, 0), axis=1)[:, None]
    dq, dk, *others = so_far
    so_far = (dq + d_own * x.k_cH, dk + d_own * x.q_cH, *others)

    def with_keys(to_row, to_column, pairs):
        """Gradients of the rows q and beta k and of the columns k, each times its decay."""
        d_a, d_l = (jnp.where(pairs, d, 0).astype(dtype) for d in (d_scores, d_strict))
        columns = (x.k_cH * to_column).astype(dtype)
        d_q = to_row * _gpu.dot(d_a, columns)
        d_erase = to_row * _gpu.dot(d_l, columns)
        d_k = _gpu.dot(d_a, (x.q_cH * to_row).astype(dtype), trans_a=True)
        erase = x.beta_c[:, None] * x.k_cH * to_row
        d_k += _gpu.dot(d_l, erase.astype(dtype), trans_a=True)
        return d_q, d_erase, to_column * d_k

    def added(so_far, d_q, d_erase, d_k, which, sign):
        dq, dk, dg, d_beta = so_far
        d_beta += jnp.sum(d_erase * x.k_cH, axis=1)
        d_erase *= x.beta_c[:, None]
        d_sums = x.q_cH * d_q + x.k_cH * (d_erase + sign * d_k)
        return dq + d_q, dk + d_erase + d_k, dg + inside.sums_vjp(which, d_sums, dtype), d_beta

    def halving(level, so_far):
        which = inside.to_border(c, level)
        decay = jnp.exp(sums.over(which))
        return added(so_far, *with_keys(decay, decay, inside.parted(c, level)), which, 1)

    levels = form.levels(c)
    so_far = lax.fori_loop(levels.start, levels.stop, halving, so_far)
    if form.anchored:
        which = inside.from_anchor(c)
        span = sums.over(which)
        grads = with_keys(jnp.exp(span), jnp.exp(-span), inside.within_anchored(c))
        so_far = added(so_far, *grads, which, -1)  # a column is divided by its decay
    return so_far


def _write(form: Form, refs: Refs, outs: Grads, x: Chunk, dq, dk, dg, d_beta) -> None:
    """Back through unit lengths, scale, gate and sigmoid."""
    dq *= form.scale
    if form.raw:
        dq, dk = (
            _unit_length_vjp(inside.rows(ref[...], x.real_c), d)
            for ref, d in ((refs.q_cH, dq), (refs.k_cH, dk))
        )
        d_beta *= x.beta_c * (1 - x.beta_c)
        gate_cH = inside.rows(refs.gate_cH[...], x.real_c)
        weights = inside.gate_weights(refs)
        dg, d_a_log = inside.log_decay_vjp(form, gate_cH, *weights, dg)
    else:
        d_a_log = dg
    dg, d_a_log = (jnp.where(x.real_c[:, None], d, 0) for d in (dg, d_a_log))
    outs.q_BPNH[...] = dq.astype(outs.q_BPNH.dtype)
    outs.k_BPNH[...] = dk.astype(outs.k_BPNH.dtype)
    outs.gate_BPNH[...] = dg.astype(outs.gate_BPNH.dtype)
    d_beta = jnp.where(x.real_c, d_beta, 0)
    outs.beta_BPN[...] = d_beta.astype(outs.beta_BPN.dtype)
    outs.a_log_GCH[...] = jnp.sum(d_a_log, axis=0)
    outs.dt_bias_GCH[...] = jnp.sum(dg, axis=0)


def _unit_length_vjp(x_cH: jax.Array, d_unit_cH: jax.Array) -> jax.Array:
    scale = inside.inverse_length(x_cH)
    unit_cH = x_cH * scale
    along = jnp.sum(unit_cH * d_unit_cH, axis=1)[:, None]
    return scale * (d_unit_cH - unit_cH * along)
