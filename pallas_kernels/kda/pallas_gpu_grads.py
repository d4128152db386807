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
from pallas_kernels.kda.pallas_gpu_chunk import Form, Refs, Rows
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
        saved, outs = _Saved(*refs[len(x) : len(x) + 5]), Grads(*refs[len(x) + 5 : -4])
        _gradients(form, tiles, dtype, Refs(*refs[: len(x)]), saved, outs, refs[-4:])

    outs = _gpu.call(
        body, name="kda_grads", grid=blocks.grid,
        in_specs=[
            *blocks.inputs(), blocks.chunk(h), blocks.tokens(h), blocks.tokens(h),
            blocks.one(H, h), blocks.one(H, h),
        ],
        out_specs=[
            *[blocks.tokens(H)] * 3, blocks.scalars(), *[blocks.one(H)] * 2,
            *[blocks.chunk(tiles.chunk)] * 4,
        ],
        out_shape=[
            *[jax.ShapeDtypeStruct(tokens, a.dtype) for a in (x.q_BPNH, x.k_BPNH, x.gate_BPNH)],
            jax.ShapeDtypeStruct(x.beta_BPN.shape, x.beta_BPN.dtype),
            *[jax.ShapeDtypeStruct((G, C, H), jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct((G, C * tiles.chunk, tiles.chunk), dtype)] * 4,
        ],
        warps=tiles.grads_warps, stages=tiles.stages,
    )(*x, errors_GPh, dv_BPNh, d_out_BPNh, entries_GCHh, d_exits_GCHh)  # fmt: skip
    return Grads(*outs[:-4])


class _Sum(NamedTuple):
    """Gradients of some channels so far."""

    q_cW: jax.Array
    k_cW: jax.Array  # of k where it erases
    write_cW: jax.Array  # of beta k, where it is written
    g_cW: jax.Array


def _gradients(
    form: Form, tiles: Tiles, dtype: Any, refs: Refs, saved: _Saved, outs: Grads, scratch: Any
):
    rows = inside.load_rows(form, refs)
    own_c, triangles = _triangles(refs, rows, saved, tiles, dtype)
    for ref, d_cc in zip(scratch, triangles, strict=True):
        ref[...] = d_cc
    _gpu.barrier()  # each level of the halving reads them

    def channels(n, so_far):
        d_beta_c, along_q_c, along_k_c = so_far
        at = inside.channels_of(refs, n, tiles.channels)
        g_cW = inside.load_log_decay(form, refs, rows, at)
        sums = inside.Sums(refs, n, g_cW)
        d = _through_states(refs, saved, rows, g_cW, own_c, sums, at, tiles, dtype)
        d = _through_pairs(form, refs, rows, n, sums, scratch, tiles, dtype, d)
        again = inside.channels_of(refs, n, tiles.channels, 1)
        q_cW, k_cW = inside.load_keys(refs, rows, again)
        dk_cW = d.k_cW + rows.beta_c[:, None] * d.write_cW
        outs.q_BPNH[:, at] = d.q_cW.astype(outs.q_BPNH.dtype)
        outs.k_BPNH[:, at] = dk_cW.astype(outs.k_BPNH.dtype)
        outs.gate_BPNH[:, at] = d.g_cW.astype(outs.gate_BPNH.dtype)
        return (
            d_beta_c + jnp.sum(k_cW * d.write_cW, axis=1),
            along_q_c + jnp.sum(q_cW * d.q_cW, axis=1),
            along_k_c + jnp.sum(k_cW * dk_cW, axis=1),
        )

    nothing = (jnp.zeros(rows.beta_c.shape, jnp.float32),) * 3
    steps = refs.q_cH.shape[1] // tiles.channels
    d_beta_c, along_q_c, along_k_c = lax.fori_loop(0, steps, channels, nothing)
    if form.raw:
        d_beta_c *= rows.beta_c * (1 - rows.beta_c)
    outs.beta_BPN[...] = jnp.where(rows.real_c, d_beta_c, 0).astype(outs.beta_BPN.dtype)
    _gpu.barrier()  # what they have got so far is read again

    def finish(n, _):
        at = inside.channels_of(refs, n, tiles.channels)
        along_c = along_q_c / form.scale**2
        _write_key(form, refs.q_cH, outs.q_BPNH, rows, at, rows.q_scale_c, along_c)
        _write_key(form, refs.k_cH, outs.k_BPNH, rows, at, rows.k_scale_c, along_k_c)
        _write_gate(form, refs, outs, rows, at)

    lax.fori_loop(0, steps, finish, None)


def _over_columns(x: Any, tiles: Tiles, add: Any, nothing: Any) -> Any:
    """Sum over the columns of values, some at a time, so that few are in registers."""

    def step(n, so_far):
        at = pl.ds(pl.multiple_of(n * tiles.columns, tiles.columns), tiles.columns)
        return tuple(a + b for a, b in zip(so_far, add(at), strict=True))

    return lax.fori_loop(0, x.shape[1] // tiles.columns, step, nothing)


def _triangles(refs: Refs, rows: Rows, saved: _Saved, tiles: Tiles, dtype: Any):
    """Gradients of decayed products: of q where i = j; of q and of k, each and its transpose."""
    c = tiles.chunk

    def add(at):
        errors = saved.errors_ch[:, at]
        d_out = inside.rows(saved.d_out_ch[:, at], rows.real_c).astype(dtype)
        dv = saved.dv_ch[:, at].astype(dtype)
        own_c = jnp.sum(d_out.astype(jnp.float32) * errors.astype(jnp.float32), axis=1)
        factors = ((d_out, errors), (errors, d_out), (dv, errors), (errors, dv))
        return own_c, *(_gpu.dot(a, b, trans_b=True) for a, b in factors)

    square = jnp.zeros((c, c), jnp.float32)
    nothing = (jnp.zeros((c,), jnp.float32), square, square, square, square)
    own_c, a, a_t, e, e_t = _over_columns(saved.errors_ch, tiles, add, nothing)
    return own_c, [inside.in_one_document(refs, d).astype(dtype) for d in (a, a_t, -e, -e_t)]


def _through_states(
    refs: Refs, saved: _Saved, rows: Rows, g_cW, own_c, sums, at, tiles: Tiles, dtype
) -> _Sum:
    """What comes back through the states at the chunk's ends, and of products of rows i = j."""

    def add(columns):
        entry, d_exit = saved.entry_Hh[at, columns], saved.d_exit_Hh[at, columns]
        d_out = inside.rows(saved.d_out_ch[:, columns], rows.real_c).astype(dtype)
        dv, errors = saved.dv_ch[:, columns].astype(dtype), saved.errors_ch[:, columns]
        return (
            _gpu.dot(d_out, entry, trans_b=True),
            _gpu.dot(dv, entry, trans_b=True),
            _gpu.dot(errors, d_exit, trans_b=True),
            jnp.sum(entry.astype(jnp.float32) * d_exit.astype(jnp.float32), axis=1),
        )

    tile, (W,) = jnp.zeros_like(g_cW), g_cW.shape[1:]
    nothing = (tile, tile, tile, jnp.zeros((W,), jnp.float32))
    dq, dk, d_write, kept = _over_columns(saved.errors_ch, tiles, add, nothing)
    decays = state_decays(refs, g_cW, sums)
    q_cW, k_cW = inside.load_keys(refs, rows, at)
    dq, dk, d_write = (
        decays.from_start_cW * dq, -decays.from_start_cW * dk, decays.to_end_cW * d_write,
    )  # fmt: skip
    write_cW = rows.beta_c[:, None] * k_cW
    dg = sums.vjp(inside.FROM_START, q_cW * dq + k_cW * dk, dtype)
    dg += sums.vjp(inside.TO_END, write_cW * d_write, dtype)
    dg += (decays.carry_W * kept)[None, :]
    own_c1 = own_c[:, None]
    return _Sum(dq + own_c1 * write_cW, dk, d_write + own_c1 * q_cW, dg)


def _through_pairs(
    form: Form, refs: Refs, rows: Rows, n, sums, scratch, tiles: Tiles, dtype, so_far: _Sum
) -> _Sum:
    """Adds what comes back through the products of rows with each other."""
    c = tiles.chunk

    def add(level, so_far: _Sum) -> _Sum:
        at = inside.channels_of(refs, n, tiles.channels, level)
        q_cW, k_cW = inside.load_keys(refs, rows, at)
        to_row, to_column = inside.decays_of_pairs(form, sums, level)
        d_a, d_a_t, d_l, d_l_t = (
            sums.pairs(c, level, i % 2, d[...]) for i, d in enumerate(scratch)
        )
        write_cW = rows.beta_c[:, None] * k_cW * to_column
        columns = write_cW.astype(dtype)
        dq, dk = to_row * _gpu.dot(d_a, columns), to_row * _gpu.dot(d_l, columns)
        d_write = _gpu.dot(d_a_t, (q_cW * to_row).astype(dtype))
        d_write += _gpu.dot(d_l_t, (k_cW * to_row).astype(dtype))
        # where anchored a column is divided by its decay
        sign = inside.sign_of_columns(form, level)
        d_sums = q_cW * dq + k_cW * dk + sign * (write_cW * d_write)
        dg = sums.vjp(inside.TO_BORDER + level, d_sums, dtype)
        added = (dq, dk, to_column * d_write, dg)
        return _Sum(*(a + b for a, b in zip(so_far, added, strict=True)))

    levels = form.levels(c)
    return lax.fori_loop(levels.start, levels.stop, add, so_far)


def _write_gate(form: Form, refs: Refs, outs: Grads, rows: Rows, at: Any) -> None:
    """Gradients of the gate and of its weights, from that of log decays in the gate's place."""
    dg_cW = inside.rows(outs.gate_BPNH[:, at], rows.real_c)
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
