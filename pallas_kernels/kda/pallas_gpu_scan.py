"""GPU kernels, second stage: the state from chunk to chunk, and its gradient back.

One program carries some columns of one head's state through all chunks. Columns are independent.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Form
from pallas_kernels.kda.pallas_gpu_prep import Blocks, Inputs, Prepared
from pallas_kernels.kda.tiles import Tiles


class _Whole:
    """Block specs of a grid (G, columns): all chunks of one head a program."""

    def __init__(self, x: Inputs, tiles: Tiles):
        blocks = Blocks(x, tiles)
        self.H, self.Nv, self.columns = blocks.H, blocks.Nv, tiles.columns
        self.h, self.G, self.C = blocks.h, *blocks.grid
        self.P = self.C * tiles.chunk
        self.grid = (self.G, self.h // tiles.columns)

    def rows(self, W: int) -> pl.BlockSpec:
        """Of [G, P, W], all columns."""
        return pl.BlockSpec((None, self.P, W), lambda i, j: (i, 0, 0))

    def columns_of_rows(self) -> pl.BlockSpec:
        """Of [G, P, h]."""
        return pl.BlockSpec((None, self.P, self.columns), lambda i, j: (i, 0, j))

    def values(self) -> pl.BlockSpec:
        """Of [B, P, Nv, h]."""
        Nv, block = self.Nv, (None, self.P, None, self.columns)
        return pl.BlockSpec(block, lambda i, j: (i // Nv, 0, i % Nv, j))

    def carry(self) -> pl.BlockSpec:
        """Of [G, C, H]."""
        return pl.BlockSpec((None, self.C, self.H), lambda i, j: (i, 0, 0))

    def state(self) -> pl.BlockSpec:
        """Of [G, H, h]."""
        return pl.BlockSpec((None, self.H, self.columns), lambda i, j: (i, 0, j))

    def states(self) -> pl.BlockSpec:
        """Of [G, C, H, h]."""
        return pl.BlockSpec((None, self.C, self.H, self.columns), lambda i, j: (i, 0, 0, j))

    def ids(self) -> pl.BlockSpec:
        """Of [B, P]."""
        Nv = self.Nv
        return pl.BlockSpec((None, self.P), lambda i, j: (i // Nv, 0))


def scan(
    x: Inputs, prepared: Prepared, errors_GPh, initial_GHh, tiles: Tiles, *, keep: bool, out_dtype
):
    """Carries the states forward.

    Returns:
      Output [B, P, Nv, h] and final state [G, H, h]; with `keep` also the errors, which take the
      memory of those of an empty state, and entry states [G, C, H, h].
    """
    whole, c = _Whole(x, tiles), tiles.chunk
    dtype = errors_GPh.dtype
    shapes = [
        jax.ShapeDtypeStruct(x.v_BPNh.shape, out_dtype),
        jax.ShapeDtypeStruct(initial_GHh.shape, jnp.float32),
    ]
    specs = [whole.values(), whole.state()]
    if keep:
        shapes.append(jax.ShapeDtypeStruct(errors_GPh.shape, dtype))
        shapes.append(jax.ShapeDtypeStruct((whole.G, whole.C, whole.H, whole.h), dtype))
        specs += [whole.columns_of_rows(), whole.states()]

    def body(k_ref, q_ref, write_ref, carry_ref, scores_ref, fresh_ref, initial_ref, *outs):
        out_ref, final_ref, *kept = outs

        def step(n, state_Hh):
            at = (pl.ds(pl.multiple_of(n * c, c), c), slice(None))
            entry_Hh = state_Hh.astype(dtype)
            error_ch = fresh_ref[at].astype(jnp.float32) - _gpu.dot(k_ref[at], entry_Hh)
            error_ch = error_ch.astype(dtype)
            if keep:
                kept[0][at], kept[1][n] = error_ch, entry_Hh
            out_ch = _gpu.dot(q_ref[at], entry_Hh) + _gpu.dot(scores_ref[at], error_ch)
            out_ref[at] = out_ch.astype(out_dtype)
            carried_Hh = carry_ref[n, :][:, None] * state_Hh
            return carried_Hh + _gpu.dot(write_ref[at], error_ch, trans_a=True)

        state_Hh = initial_ref[...].astype(jnp.float32)
        final_ref[...] = lax.fori_loop(0, whole.C, step, state_Hh)

    return _gpu.call(
        body, name="kda_scan", grid=whole.grid,
        in_specs=[
            *[whole.rows(whole.H)] * 3, whole.carry(), whole.rows(c), whole.columns_of_rows(),
            whole.state(),
        ],
        out_specs=specs, out_shape=shapes, warps=tiles.scan_warps, stages=tiles.stages,
        aliases={5: 2} if keep else None,
    )(*prepared[:5], errors_GPh, initial_GHh)  # fmt: skip


def scan_back(form: Form, x: Inputs, prepared: Prepared, d_out_BPNh, d_final_GHh, tiles: Tiles):
    """Carries the states' gradients back.

    Returns:
      Gradients of the values [B, P, Nv, h], of exit states [G, C, H, h], of the initial state.
    """
    whole, c = _Whole(x, tiles), tiles.chunk
    dtype = prepared.q_GPH.dtype

    def body(
        k_ref, q_ref, write_ref, carry_ref, scores_ref, inverse_ref, d_out_ref, d_final_ref,
        ids_ref, dv_ref, d_exits_ref, d_initial_ref,
    ):  # fmt: skip
        def step(back, d_exit_Hh):
            n = whole.C - 1 - back
            first = pl.multiple_of(n * c, c)
            at = (pl.ds(first, c), slice(None))
            real_c = inside.real_rows(form, ids_ref[pl.ds(first, c)], first)
            d_out_ch = inside.rows(d_out_ref[at], real_c).astype(dtype)
            d_exit = d_exit_Hh.astype(dtype)
            d_exits_ref[n] = d_exit
            d_error_ch = _gpu.dot(scores_ref[at], d_out_ch, trans_a=True)
            d_error_ch += _gpu.dot(write_ref[at], d_exit)
            d_error_ch = d_error_ch.astype(dtype)
            dv_ch = _gpu.dot(inverse_ref[at], d_error_ch, trans_a=True)
            dv_ref[at] = dv_ch.astype(dv_ref.dtype)
            d_entry_Hh = carry_ref[n, :][:, None] * d_exit_Hh
            d_entry_Hh += _gpu.dot(q_ref[at], d_out_ch, trans_a=True)
            return d_entry_Hh - _gpu.dot(k_ref[at], d_error_ch, trans_a=True)

        d_final_Hh = d_final_ref[...].astype(jnp.float32)
        d_initial_ref[...] = lax.fori_loop(0, whole.C, step, d_final_Hh)

    return _gpu.call(
        body, name="kda_scan_back", grid=whole.grid,
        in_specs=[
            *[whole.rows(whole.H)] * 3, whole.carry(), *[whole.rows(c)] * 2, whole.values(),
            whole.state(), whole.ids(),
        ],
        out_specs=[whole.values(), whole.states(), whole.state()],
        out_shape=[
            jax.ShapeDtypeStruct(x.v_BPNh.shape, x.v_BPNh.dtype),
            jax.ShapeDtypeStruct((whole.G, whole.C, whole.H, whole.h), dtype),
            jax.ShapeDtypeStruct(d_final_GHh.shape, jnp.float32),
        ],
        warps=tiles.scan_warps, stages=tiles.stages,
    )(*prepared, d_out_BPNh, d_final_GHh, x.ids_BP)  # fmt: skip
