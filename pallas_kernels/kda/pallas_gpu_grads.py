"""GPU kernel, last stage of the gradient: from states and their gradients to all inputs of a chunk.

README.md has the maths. Every decay multiplies a row y, so the sum in its exponent gets y * dy; the
gradient of a log decay is the sum over the runs of rows it is part of, where nothing large cancels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Channels, Form, Refs, Rows
from pallas_kernels.kda.pallas_gpu_prep import Blocks, Inputs, channels_of, state_decays
from pallas_kernels.kda.tiles import Tiles


class Grads(NamedTuple):
    """Gradients by value head; of a_log and dt_bias a share for each chunk and channel."""

    q_BPNH: jax.Array
    k_BPNH: jax.Array
    gate_BPNH: jax.Array
    beta_BPN: jax.Array
    a_log_GCH: jax.Array
    dt_bias_GCH: jax.Array


class _Saved(NamedTuple):
    """References of one program to what earlier kernels have left."""

    errors_ch: Any
    dv_ch: Any
    d_out_ch: Any
    entry_Hh: Any
    d_exit_Hh: Any


def gradients(
    form: Form, x: Inputs, errors_GPh, dv_BPNh, d_out_BPNh, entries_GCHh, d_exits_GCHh,
    tiles: Tiles,
) -> Grads:  # fmt: skip
    """Gradients of the inputs besides v, from those of v, of the output, of the exit states."""
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    (G, C), H, h = blocks.grid, blocks.H, blocks.h
    tokens = (*x.v_BPNh.shape[:3], H)

    def body(*refs):
        saved = _Saved(*refs[len(x) : len(x) + 5])
        _gradients(form, tiles, dtype, Refs(*refs[: len(x)]), saved, Grads(*refs[len(x) + 5 :]))

    outs = _gpu.call(
        body, name="kda_grads", grid=blocks.grid,
        in_specs=[
            *blocks.inputs(), blocks.chunk(h), blocks.tokens(h), blocks.tokens(h),
            blocks.one(H, h), blocks.one(H, h),
        ],
        out_specs=[
            *[blocks.tokens(H)] * 3, blocks.scalars(), *[blocks.one(H)] * 2,
        ],
        out_shape=[
            *[jax.ShapeDtypeStruct(tokens, a.dtype) for a in (x.q_BPNH, x.k_BPNH, x.gate_BPNH)],
            jax.ShapeDtypeStruct(x.beta_BPN.shape, x.beta_BPN.dtype),
            *[jax.ShapeDtypeStruct((G, C, H), jnp.float32)] * 2,
        ],
        warps=tiles.grads_warps, stages=tiles.stages,
    )(*x, errors_GPh, dv_BPNh, d_out_BPNh, entries_GCHh, d_exits_GCHh)  # fmt: skip
    return Grads(*outs)


class _Sum(NamedTuple):
    """Gradients of some channels so far."""

    q_cW: jax.Array
    k_cW: jax.Array  # of k where it erases
    write_cW: jax.Array  # of beta k, where it is written
    g_cW: jax.Array


def _gradients(form: Form, tiles: Tiles, dtype: Any, refs: Refs, saved: _Saved, outs: Grads):
    rows = inside.load_rows(form, refs)
    scores_c, triangles = _triangles(refs, rows, saved, dtype)

    def channels(n, so_far):
        d_beta_c, along_q_c, along_k_c = so_far
        at = channels_of(n, tiles)
        x = inside.load_channels(form, refs, rows, at)
        sums = inside.Sums(refs.runs_Kcc, x.g_cW)
        d = _through_states(refs, saved, rows, x, scores_c, sums, at, dtype)
        d = _through_pairs(form, rows, x, sums, triangles, dtype, d)
        dk_cW = d.k_cW + rows.beta_c[:, None] * d.write_cW
        outs.q_BPNH[:, at] = d.q_cW.astype(outs.q_BPNH.dtype)
        outs.k_BPNH[:, at] = dk_cW.astype(outs.k_BPNH.dtype)
        _write_gate(form, refs, outs, rows, at, d.g_cW)
        return (
            d_beta_c + jnp.sum(x.k_cW * d.write_cW, axis=1),
            along_q_c + jnp.sum(x.q_cW * d.q_cW, axis=1),
            along_k_c + jnp.sum(x.k_cW * dk_cW, axis=1),
        )

    nothing = (jnp.zeros(rows.beta_c.shape, jnp.float32),) * 3
    steps = refs.q_cH.shape[1] // tiles.channels
    d_beta_c, along_q_c, along_k_c = lax.fori_loop(0, steps, channels, nothing)
    if form.raw:
        d_beta_c *= rows.beta_c * (1 - rows.beta_c)
    outs.beta_BPN[...] = jnp.where(rows.real_c, d_beta_c, 0).astype(outs.beta_BPN.dtype)
    _gpu.barrier()  # what keys and queries get is read again

    def finish(n, _):
        at, along_c = channels_of(n, tiles), along_q_c / form.scale**2
        _write_key(form, refs.q_cH, outs.q_BPNH, rows, at, rows.q_scale_c, along_c)
        _write_key(form, refs.k_cH, outs.k_BPNH, rows, at, rows.k_scale_c, along_k_c)

    lax.fori_loop(0, steps, finish, None)


def _triangles(refs: Refs, rows: Rows, saved: _Saved, dtype: Any):
    """Gradients of decayed products, i > j, those of q and of k with written keys; of q, i = j."""
    errors = saved.errors_ch[...]
    d_out = inside.rows(saved.d_out_ch[...], rows.real_c).astype(dtype)
    d_scores = _gpu.dot(d_out, errors, trans_b=True)
    d_strict = -_gpu.dot(saved.dv_ch[...].astype(dtype), errors, trans_b=True)
    own_c = jnp.sum(d_out.astype(jnp.float32) * errors.astype(jnp.float32), axis=1)
    both = (inside.in_one_document(refs, d).astype(dtype) for d in (d_scores, d_strict))
    return own_c, tuple(both)


def _through_states(
    refs: Refs, saved: _Saved, rows: Rows, x: Channels, own_c, sums, at, dtype
) -> _Sum:
    """What comes back through the states at the chunk's ends, and of products of rows i = j."""
    entry, d_exit = saved.entry_Hh[at, :], saved.d_exit_Hh[at, :]
    decays = state_decays(refs, x.g_cW, sums)
    d_out = inside.rows(saved.d_out_ch[...], rows.real_c).astype(dtype)
    dq = decays.from_start_cW * _gpu.dot(d_out, entry, trans_b=True)
    dk = -decays.from_start_cW * _gpu.dot(saved.dv_ch[...].astype(dtype), entry, trans_b=True)
    dg = sums.vjp(inside.FROM_START, x.q_cW * dq + x.k_cW * dk, dtype)
    d_write = decays.to_end_cW * _gpu.dot(saved.errors_ch[...], d_exit, trans_b=True)
    write_cW = rows.beta_c[:, None] * x.k_cW
    dg += sums.vjp(inside.TO_END, write_cW * d_write, dtype)
    kept = jnp.sum(entry.astype(jnp.float32) * d_exit.astype(jnp.float32), axis=1)
    dg += (decays.carry_W * kept)[None, :]
    own_c1 = own_c[:, None]
    return _Sum(dq + own_c1 * write_cW, dk, d_write + own_c1 * x.q_cW, dg)


def _through_pairs(form: Form, rows: Rows, x: Channels, sums, triangles, dtype, so_far) -> _Sum:
    """Adds what comes back through the products of rows with each other."""
    c = x.g_cW.shape[0]

    def add(level, so_far: _Sum) -> _Sum:
        to_row, to_column = inside.decays_of_pairs(form, sums, level)
        which = inside.pairs(form, c, level)
        d_a, d_l = (jnp.where(which, d, jnp.zeros((), dtype)) for d in triangles)
        write_cW = rows.beta_c[:, None] * x.k_cW * to_column
        columns = write_cW.astype(dtype)
        dq, dk = to_row * _gpu.dot(d_a, columns), to_row * _gpu.dot(d_l, columns)
        d_write = _gpu.dot(d_a, (x.q_cW * to_row).astype(dtype), trans_a=True)
        d_write += _gpu.dot(d_l, (x.k_cW * to_row).astype(dtype), trans_a=True)
        # where anchored a column is divided by its decay
        sign = inside.sign_of_columns(form, level)
        d_sums = x.q_cW * dq + x.k_cW * dk + sign * (write_cW * d_write)
        dg = sums.vjp(inside.TO_BORDER + level, d_sums, dtype)
        added = (dq, dk, to_column * d_write, dg)
        return _Sum(*(a + b for a, b in zip(so_far, added, strict=True)))

    levels = form.levels(c)
    return lax.fori_loop(levels.start, levels.stop, add, so_far)


def _write_gate(form: Form, refs: Refs, outs: Grads, rows: Rows, at: Any, dg_cW) -> None:
    """Gradients of the gate and of its weights, from those of log decays."""
    dg_cW = jnp.where(rows.real_c[:, None], dg_cW, 0)
    d_a_log_cW = dg_cW
    if form.raw:
        gate_cW = inside.rows(refs.gate_cH[:, at], rows.real_c)
        weights = inside.gate_weights(refs, at)
        dg_cW, d_a_log_cW = inside.log_decay_vjp(form, gate_cW, *weights, dg_cW)
    outs.gate_BPNH[:, at] = dg_cW.astype(outs.gate_BPNH.dtype)
    outs.a_log_GCH[at] = jnp.sum(d_a_log_cW, axis=0)
    outs.dt_bias_GCH[at] = jnp.sum(dg_cW, axis=0)


def _write_key(form: Form, ref: Any, out: Any, rows: Rows, at: Any, scale_c, along_c) -> None:
    """Gradient of q or k from that of it scaled, in `out`; `along_c` is the product of the two."""
    d_cW = out[:, at].astype(jnp.float32) * scale_c[:, None]
    if form.raw:
        x_cW = inside.rows(ref[:, at], rows.real_c)
        d_cW -= x_cW * (scale_c * scale_c * along_c)[:, None]
    out[:, at] = jnp.where(rows.real_c[:, None], d_cW, 0).astype(out.dtype)
