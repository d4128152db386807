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
from pallas_kernels.kda.pallas_gpu_chunk import Channels, Form, Refs, Rows
from pallas_kernels.kda.pallas_gpu_prep import Blocks, Inputs, state_decays
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
    triangles = _triangles(rows, saved, dtype)
    (c,), H = rows.beta_c.shape, refs.q_cH.shape[1]
    d_beta_c = along_q_c = along_k_c = jnp.zeros((c,), jnp.float32)
    of_keys = []
    for first in range(0, H, tiles.channels):
        at = pl.ds(first, tiles.channels)
        x = inside.load_channels(form, refs, rows, at)
        sums = inside.Sums(x.g_cW)
        d = _through_states(refs, saved, rows, x, sums, at, dtype)
        d = _through_pairs(form, x, sums, triangles, dtype, d)
        dk_cW = d.k_cW + rows.beta_c[:, None] * d.write_cW
        d_beta_c += jnp.sum(x.k_cW * d.write_cW, axis=1)
        along_q_c += jnp.sum(x.q_cW * d.q_cW, axis=1)
        along_k_c += jnp.sum(x.k_cW * dk_cW, axis=1)
        _write_gate(form, refs, outs, rows, at, d.g_cW)
        of_keys.append((at, d.q_cW, dk_cW))
    if form.raw:
        d_beta_c *= rows.beta_c * (1 - rows.beta_c)
    outs.beta_BPN[...] = jnp.where(rows.real_c, d_beta_c, 0).astype(outs.beta_BPN.dtype)
    for at, dq_cW, dk_cW in of_keys:
        scale, along = rows.q_scale_c, along_q_c / form.scale**2
        _write_key(form, refs.q_cH, outs.q_BPNH, rows, at, dq_cW, scale, along)
        _write_key(form, refs.k_cH, outs.k_BPNH, rows, at, dk_cW, rows.k_scale_c, along_k_c)


def _triangles(rows: Rows, saved: _Saved, dtype: Any):
    """Gradients of decayed products, those of q and of k with written keys, inside documents."""
    errors = saved.errors_ch[...]
    d_out = inside.rows(saved.d_out_ch[...], rows.real_c).astype(dtype)
    d_scores = _gpu.dot(d_out, errors, trans_b=True)
    d_strict = -_gpu.dot(saved.dv_ch[...].astype(dtype), errors, trans_b=True)
    return tuple(jnp.where(rows.same_cc, d, 0) for d in (d_scores, d_strict))


def _through_states(refs: Refs, saved: _Saved, rows: Rows, x: Channels, sums, at, dtype) -> _Sum:
    """What comes back through the states at the chunk's ends."""
    c = rows.beta_c.shape[0]
    entry, d_exit = saved.entry_Hh[at, :], saved.d_exit_Hh[at, :]
    decays = state_decays(refs, x.g_cW, sums)
    d_out = inside.rows(saved.d_out_ch[...], rows.real_c).astype(dtype)
    dq = decays.from_start_cW * _gpu.dot(d_out, entry, trans_b=True)
    dk = -decays.from_start_cW * _gpu.dot(saved.dv_ch[...].astype(dtype), entry, trans_b=True)
    dg = inside.sums_vjp(inside.from_start(c), x.q_cW * dq + x.k_cW * dk, dtype)
    d_write = decays.to_end_cW * _gpu.dot(saved.errors_ch[...], d_exit, trans_b=True)
    dg += inside.sums_vjp(inside.to_end(c), x.write_cW * d_write, dtype)
    kept = jnp.sum(entry.astype(jnp.float32) * d_exit.astype(jnp.float32), axis=1)
    return _Sum(dq, dk, d_write, dg + (decays.carry_W * kept)[None, :])


def _through_pairs(form: Form, x: Channels, sums, triangles, dtype, so_far: _Sum) -> _Sum:
    """Adds what comes back through the products of rows with each other."""
    c = x.g_cW.shape[0]
    i, j = inside.iotas(c)
    own = jnp.sum(jnp.where(i == j, triangles[0], 0), axis=1)[:, None]
    q, write = so_far.q_cW + own * x.write_cW, so_far.write_cW + own * x.q_cW
    so_far = so_far._replace(q_cW=q, write_cW=write)

    def add(to_row, to_column, pairs, which, sign, so_far: _Sum) -> _Sum:
        d_a, d_l = (jnp.where(pairs, d, 0).astype(dtype) for d in triangles)
        columns = (x.write_cW * to_column).astype(dtype)
        dq, dk = to_row * _gpu.dot(d_a, columns), to_row * _gpu.dot(d_l, columns)
        d_write = _gpu.dot(d_a, (x.q_cW * to_row).astype(dtype), trans_a=True)
        d_write += _gpu.dot(d_l, (x.k_cW * to_row).astype(dtype), trans_a=True)
        d_write *= to_column
        d_sums = x.q_cW * dq + x.k_cW * dk + sign * (x.write_cW * d_write)
        dg = inside.sums_vjp(which, d_sums, dtype)
        return _Sum(*(a + b for a, b in zip(so_far, (dq, dk, d_write, dg), strict=True)))

    def halving(level, so_far: _Sum) -> _Sum:
        which = inside.to_border(c, level)
        decay = jnp.exp(sums.over(which))
        return add(decay, decay, inside.parted(c, level), which, 1, so_far)

    levels = form.levels(c)
    so_far = lax.fori_loop(levels.start, levels.stop, halving, so_far)
    if form.anchored:
        which = inside.from_anchor(c)
        span = sums.over(which)
        # a column is divided by its decay
        so_far = add(jnp.exp(span), jnp.exp(-span), inside.within_anchored(c), which, -1, so_far)
    return so_far


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


def _write_key(form: Form, ref: Any, out: Any, rows: Rows, at: Any, d_cW, scale_c, along_c):
    """Gradient of q or k, from that of it scaled; `along_c` is the product of the two."""
    d_cW = d_cW * scale_c[:, None]
    if form.raw:
        x_cW = inside.rows(ref[:, at], rows.real_c)
        d_cW -= x_cW * (scale_c * scale_c * along_c)[:, None]
    out[:, at] = jnp.where(rows.real_c[:, None], d_cW, 0).astype(out.dtype)
