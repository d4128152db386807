"""GPU kernel, last half of the gradient of inputs: what comes back through pairs of rows.

README.md has the maths. Every decay multiplies a row y, so the sum in its exponent gets y * dy; the
gradient of a log decay is the sum over the runs of rows it is part of. Where blocks are anchored,
pairs whose run does not hold a row come back to it with both signs: both times they are the product
of the same rounded factors, summed without rounding, so that they cancel in any dtype.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Form, Refs, Rows
from pallas_kernels.kda.pallas_gpu_prep import Blocks, Inputs
from pallas_kernels.kda.pallas_gpu_states import Partial
from pallas_kernels.kda.tiles import Tiles


class Grads(NamedTuple):
    """Gradients by value head; of a_log and dt_bias a share for each chunk and channel.

    Those of q and k are still of scaled unit queries and unit keys.
    """

    q_BPNH: jax.Array
    k_BPNH: jax.Array
    gate_BPNH: jax.Array
    beta_BPN: jax.Array
    a_log_GCH: jax.Array
    dt_bias_GCH: jax.Array


def through_pairs(form: Form, x: Inputs, partial: Partial, tiles: Tiles) -> Grads:
    """Adds what comes back through products of rows with each other."""
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    (G, C), H = blocks.grid, blocks.H
    tokens = partial.q_BPNH.shape

    def body(*refs):
        so_far, outs = Partial(*refs[len(x) : -len(Grads._fields)]), refs[-len(Grads._fields) :]
        _through_pairs(form, tiles, dtype, Refs(*refs[: len(x)]), so_far, Grads(*outs))

    outs = _gpu.call(
        body, name="kda_grads_pairs", grid=blocks.grid,
        in_specs=[
            *blocks.inputs(), *[blocks.tokens(H)] * 3, blocks.scalars(),
            *[blocks.chunk(tiles.chunk)] * 4,
        ],
        out_specs=[*[blocks.tokens(H)] * 3, blocks.scalars(), *[blocks.one(H)] * 2],
        out_shape=[
            *[jax.ShapeDtypeStruct(tokens, a) for a in (dtype, dtype, x.gate_BPNH.dtype)],
            jax.ShapeDtypeStruct(x.beta_BPN.shape, x.beta_BPN.dtype),
            *[jax.ShapeDtypeStruct((G, C, H), jnp.float32)] * 2,
        ],
        warps=tiles.pairs_warps, stages=tiles.pairs_stages,
    )(*x, *partial)  # fmt: skip
    return Grads(*outs)


class _Sum(NamedTuple):
    """Gradients of some channels so far."""

    q_cW: jax.Array
    k_cW: jax.Array  # of k where it erases
    write_cW: jax.Array  # of beta k, where it is written
    g_cW: jax.Array


def _through_pairs(
    form: Form, tiles: Tiles, dtype: Any, refs: Refs, so_far: Partial, outs: Grads
) -> None:
    rows, W = inside.load_rows(form, refs), tiles.pairs_channels

    def channels(n, d_beta_c):
        d = _levels(form, refs, rows, n, so_far, tiles, dtype)
        # behind the loop of the halvings, so that it is not loaded before
        at = inside.channels_of(refs, n, W, 1)
        _, k_cW = inside.load_keys(refs, rows, at)
        dk_cW = d.k_cW + rows.beta_c[:, None] * d.write_cW
        for out, partial, d_cW in (
            (outs.q_BPNH, so_far.q_BPNH, d.q_cW), (outs.k_BPNH, so_far.k_BPNH, dk_cW)
        ):  # fmt: skip
            out[:, at] = (d_cW + partial[:, at].astype(jnp.float32)).astype(out.dtype)
        _write_gate(form, refs, outs, rows, at, d.g_cW + so_far.log_decay_BPNH[:, at])
        return d_beta_c + jnp.sum(k_cW * d.write_cW, axis=1)

    d_beta_c = so_far.beta_BPN[...]
    d_beta_c = lax.fori_loop(0, refs.q_cH.shape[1] // W, channels, d_beta_c)
    if form.raw:
        d_beta_c *= rows.beta_c * (1 - rows.beta_c)
    outs.beta_BPN[...] = jnp.where(rows.real_c, d_beta_c, 0).astype(outs.beta_BPN.dtype)


def _levels(
    form: Form, refs: Refs, rows: Rows, n, so_far: Partial, tiles: Tiles, dtype: Any
) -> _Sum:
    """Gradients of some channels, each halving of the chunk one product of all its rows."""
    c, W = tiles.chunk, tiles.pairs_channels
    sums = inside.Sums(
        refs, n, inside.load_log_decay(form, refs, rows, inside.channels_of(refs, n, W))
    )

    def add(level, so_far_cW: _Sum) -> _Sum:
        at = inside.channels_of(refs, n, W, level)
        q_cW, k_cW = inside.load_keys(refs, rows, at)
        to_row, to_column = inside.decays_of_pairs(form, sums, level)
        write_cW = (rows.beta_c[:, None] * k_cW * to_column).astype(dtype)
        q_cW, k_cW = (q_cW * to_row).astype(dtype), (k_cW * to_row).astype(dtype)

        def product(i, a_cW):
            d_cc = sums.pairs(c, level, i % 2, inside.later(refs, so_far[4 + i], level))
            return _gpu.dot(d_cc, a_cW)

        dq, d_write = product(0, write_cW), product(1, q_cW)
        dk, d_write = product(2, write_cW), d_write + product(3, k_cW)
        # where anchored a column is divided by its decay
        sign = inside.sign_of_columns(form, level)
        d_sums = q_cW * dq + k_cW * dk + sign * (write_cW * d_write)
        dg = sums.vjp(inside.TO_BORDER + level, d_sums, dtype)
        added = (to_row * dq, to_row * dk, to_column * d_write, dg)
        return _Sum(*(a + b for a, b in zip(so_far_cW, added, strict=True)))

    levels = form.levels(c)
    nothing = _Sum(*(jnp.zeros((c, W), jnp.float32),) * 4)
    return lax.fori_loop(levels.start, levels.stop, add, nothing)


def _write_gate(form: Form, refs: Refs, outs: Grads, rows: Rows, at: Any, dg_cW) -> None:
    """Gradients of the gate and of its weights, from that of log decays."""
    dg_cW = inside.rows(dg_cW, rows.real_c)
    d_a_log_cW = dg_cW
    if form.raw:
        gate_cW = inside.rows(refs.gate_cH[:, at], rows.real_c)
        weights = inside.gate_weights(refs, at)
        dg_cW, d_a_log_cW = inside.log_decay_vjp(form, gate_cW, *weights, dg_cW)
    outs.gate_BPNH[:, at] = dg_cW.astype(outs.gate_BPNH.dtype)
    outs.a_log_GCH[at] = jnp.sum(d_a_log_cW, axis=0)
    outs.dt_bias_GCH[at] = jnp.sum(dg_cW, axis=0)
