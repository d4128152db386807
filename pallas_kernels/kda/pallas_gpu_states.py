"""GPU kernel, first half of the gradient of inputs: what comes back through states.

README.md has the maths. Besides, it makes the triangles of gradients that the other half reads.
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


class Partial(NamedTuple):
    """Gradients through states, for the other half to add to; by value head.

    Those of q and k are of scaled unit queries and unit keys. Triangles are gradients of decayed
    products inside documents: of q, then of k, each followed by its transpose; what is right of the
    diagonal, and on it, does not count.
    """

    q_BPNH: jax.Array
    k_BPNH: jax.Array
    log_decay_BPNH: jax.Array  # float32
    beta_BPN: jax.Array  # float32
    scores_GPc: jax.Array
    scores_t_GPc: jax.Array
    strict_GPc: jax.Array
    strict_t_GPc: jax.Array


class _Saved(NamedTuple):
    """References of one program to what earlier kernels have left."""

    errors_ch: Any
    dv_ch: Any
    d_out_ch: Any
    entry_Hh: Any
    d_exit_Hh: Any


def through_states(
    form: Form, x: Inputs, errors_GPh, dv_BPNh, d_out_BPNh, entries_GCHh, d_exits_GCHh,
    tiles: Tiles,
) -> Partial:  # fmt: skip
    """From the gradients of v, of the output, of the exit states; and those of rows i = j."""
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    G, C = blocks.grid
    H, h, c = blocks.H, blocks.h, tiles.chunk
    tokens = (*x.v_BPNh.shape[:3], H)

    def body(*refs):
        saved, outs = _Saved(*refs[len(x) : len(x) + 5]), Partial(*refs[len(x) + 5 :])
        _through_states(form, tiles, dtype, Refs(*refs[: len(x)]), saved, outs)

    outs = _gpu.call(
        body, name="kda_grads_states", grid=blocks.grid,
        in_specs=[
            *blocks.inputs(), blocks.chunk(h), blocks.tokens(h), blocks.tokens(h),
            blocks.one(H, h), blocks.one(H, h),
        ],
        out_specs=[*[blocks.tokens(H)] * 3, blocks.scalars(), *[blocks.chunk(c)] * 4],
        out_shape=[
            *[jax.ShapeDtypeStruct(tokens, a) for a in (dtype, dtype, jnp.float32)],
            jax.ShapeDtypeStruct(x.beta_BPN.shape, jnp.float32),
            *[jax.ShapeDtypeStruct((G, C * c, c), dtype)] * 4,
        ],
        warps=tiles.states_warps, stages=tiles.stages,
    )(*x, errors_GPh, dv_BPNh, d_out_BPNh, entries_GCHh, d_exits_GCHh)  # fmt: skip
    return Partial(*outs)


def _through_states(
    form: Form, tiles: Tiles, dtype: Any, refs: Refs, saved: _Saved, outs: Partial
) -> None:
    rows = inside.load_rows(form, refs)
    own_c = _triangles(refs, rows, saved, outs, tiles, dtype)

    def channels(n, d_beta_c):
        at = inside.channels_of(refs, n, tiles.states_channels)
        entering = _from_states(saved, rows, at, tiles, dtype)
        return d_beta_c + _write_channels(form, refs, rows, n, at, own_c, entering, outs, tiles)

    steps = refs.q_cH.shape[1] // tiles.states_channels
    outs.beta_BPN[...] = lax.fori_loop(0, steps, channels, jnp.zeros_like(own_c))


def _over_columns(x: Any, tiles: Tiles, add: Any, nothing: Any) -> Any:
    """Sum over the columns of values, some at a time, so that few are in registers."""

    def step(n, so_far):
        at = pl.ds(pl.multiple_of(n * tiles.columns, tiles.columns), tiles.columns)
        return tuple(a + b for a, b in zip(so_far, add(at), strict=True))

    return lax.fori_loop(0, x.shape[1] // tiles.columns, step, nothing)


def _triangles(
    refs: Refs, rows: Rows, saved: _Saved, outs: Partial, tiles: Tiles, dtype: Any
) -> jax.Array:
    """Writes gradients of decayed products; returns those of queries and keys of the same row."""
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
    for ref, d_cc in zip(outs[4:], (a, a_t, -e, -e_t), strict=True):
        ref[...] = inside.in_one_document(refs, d_cc).astype(dtype)
    return own_c


class _Entering(NamedTuple):
    """Gradients of some channels where they meet a state, before any decay."""

    q_cW: jax.Array
    k_cW: jax.Array
    write_cW: jax.Array
    carry_W: jax.Array


def _from_states(saved: _Saved, rows: Rows, at: Any, tiles: Tiles, dtype: Any) -> _Entering:
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

    tile = jnp.zeros((tiles.chunk, tiles.states_channels), jnp.float32)
    nothing = (tile, tile, tile, jnp.zeros((tiles.states_channels,), jnp.float32))
    return _Entering(*_over_columns(saved.errors_ch, tiles, add, nothing))


def _write_channels(
    form: Form, refs: Refs, rows: Rows, n: Any, at: Any, own_c, entering: _Entering,
    outs: Partial, tiles: Tiles,
) -> jax.Array:  # fmt: skip
    """Writes the gradients of some channels; returns their share of the gradient of beta."""
    g_cW, dtype = inside.load_log_decay(form, refs, rows, at), outs.q_BPNH.dtype
    sums = inside.Sums(refs, n, g_cW)
    decays = state_decays(refs, g_cW, sums)
    q_cW, k_cW = inside.load_keys(refs, rows, at)
    write_cW = rows.beta_c[:, None] * k_cW
    dq, dk = decays.from_start_cW * entering.q_cW, -decays.from_start_cW * entering.k_cW
    d_write = decays.to_end_cW * entering.write_cW
    dg = sums.vjp(inside.FROM_START, q_cW * dq + k_cW * dk, dtype)
    dg += sums.vjp(inside.TO_END, write_cW * d_write, dtype)
    dg += (decays.carry_W * entering.carry_W)[None, :]
    outs.log_decay_BPNH[:, at] = dg
    own_c1 = own_c[:, None]
    d_write += own_c1 * q_cW
    outs.q_BPNH[:, at] = (dq + own_c1 * write_cW).astype(outs.q_BPNH.dtype)
    outs.k_BPNH[:, at] = (dk + rows.beta_c[:, None] * d_write).astype(outs.k_BPNH.dtype)
    return jnp.sum(k_cW * d_write, axis=1)
