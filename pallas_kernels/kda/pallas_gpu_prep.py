"""GPU kernel, first stage: all of a chunk that needs no entry state; chunks in parallel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Form, Refs
from pallas_kernels.kda.pallas_gpu_triangles import triangles, unit_inverse
from pallas_kernels.kda.tiles import Tiles


class Inputs(NamedTuple):
    """Arrays of one call, filled up to whole chunks; P positions, C chunks, G = B * Nv heads."""

    q_BPNH: jax.Array
    k_BPNH: jax.Array
    v_BPNh: jax.Array
    gate_BPNH: jax.Array
    beta_BPN: jax.Array
    a_log_N: jax.Array
    dt_bias_NH: jax.Array
    ids_BP: jax.Array
    entry_BC: jax.Array
    runs_K2cc: jax.Array  # bfloat16
    zero_S: jax.Array


class Prepared(NamedTuple):
    """What the scans read; heads first."""

    k_GPH: jax.Array  # X k_in: what the errors are lowered by is this times the entry state
    q_GPH: jax.Array  # queries as they meet the entry state
    write_GPH: jax.Array  # beta k as they reach the exit state
    carry_GCH: jax.Array  # decay from the entry state to the exit state
    scores_GPc: jax.Array  # decayed products of queries with beta k
    inverse_GPc: jax.Array  # X


class Blocks:
    """Block specs of a grid (G, C): one head and one chunk a program."""

    def __init__(self, x: Inputs, tiles: Tiles):
        self.c, self.runs, self.steps = tiles.chunk, x.runs_K2cc.shape, x.zero_S.shape
        _, P, self.Nv, self.h = x.v_BPNh.shape
        self.H = x.q_BPNH.shape[-1]
        self.group = self.Nv // x.q_BPNH.shape[2]
        self.grid = (x.v_BPNh.shape[0] * self.Nv, P // self.c)

    def tokens(self, W: int, group: int = 1) -> pl.BlockSpec:
        """Of [B, P, Nv / group, W]."""
        Nv = self.Nv
        return pl.BlockSpec((None, self.c, None, W), lambda i, j: (i // Nv, j, i % Nv // group, 0))

    def scalars(self) -> pl.BlockSpec:
        """Of [B, P, Nv]."""
        Nv = self.Nv
        return pl.BlockSpec((None, self.c, None), lambda i, j: (i // Nv, j, i % Nv))

    def chunk(self, W: int) -> pl.BlockSpec:
        """Of [G, P, W]."""
        return pl.BlockSpec((None, self.c, W), lambda i, j: (i, j, 0))

    def one(self, *dims: int) -> pl.BlockSpec:
        """Of [G, C, *dims]."""
        return pl.BlockSpec((None, None, *dims), lambda i, j: (i, j, *(0 for _ in dims)))

    def inputs(self) -> list[pl.BlockSpec]:
        """Of `Inputs`, in order."""
        Nv, H = self.Nv, self.H
        return [
            self.tokens(H, self.group), self.tokens(H, self.group), self.tokens(self.h),
            self.tokens(H), self.scalars(),
            pl.BlockSpec((1,), lambda i, j: (i % Nv,)),
            pl.BlockSpec((None, H), lambda i, j: (i % Nv, 0)),
            pl.BlockSpec((None, self.c), lambda i, j: (i // Nv, j)),
            pl.BlockSpec((None, 1), lambda i, j: (i // Nv, j)),
            pl.BlockSpec(self.runs, lambda i, j: (0, 0, 0, 0)),
            pl.BlockSpec(self.steps, lambda i, j: (0,)),
        ]  # fmt: skip


def prepare(form: Form, x: Inputs, tiles: Tiles) -> tuple[Prepared, jax.Array]:
    """Products of each chunk with itself, and X v [G, P, h], the errors of an empty state."""
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    G, C = blocks.grid
    P, c, H, h = C * tiles.chunk, tiles.chunk, blocks.H, blocks.h
    widths = (H, H, H, None, c, c, h)
    shapes = [jax.ShapeDtypeStruct((G, P, W), dtype) for W in widths if W]
    specs = [blocks.chunk(W) for W in widths if W]
    shapes.insert(3, jax.ShapeDtypeStruct((G, C, H), jnp.float32))
    specs.insert(3, blocks.one(H))

    def body(*refs):
        outs = Prepared(*refs[len(x) : -1])
        _prepare(form, tiles, dtype, Refs(*refs[: len(x)]), outs, refs[-1])

    *prepared, errors = _gpu.call(
        body, name="kda_prep", grid=blocks.grid, in_specs=blocks.inputs(), out_specs=specs,
        out_shape=shapes, warps=tiles.prep_warps, stages=tiles.stages,
    )(*x)  # fmt: skip
    return Prepared(*prepared), errors


def _prepare(form: Form, tiles: Tiles, dtype: Any, refs: Refs, outs: Prepared, errors_ref: Any):
    rows = inside.load_rows(form, refs)
    scores_cc, strict_cc = triangles(form, refs, rows, tiles.prep_channels, dtype)
    outs.scores_GPc[...] = scores_cc.astype(dtype)
    inverse_cc = unit_inverse(strict_cc, exact=dtype == jnp.float32).astype(dtype)
    outs.inverse_GPc[...] = inverse_cc

    def channels(n, _):
        at = inside.channels_of(refs, n, tiles.prep_channels)
        g_cW = inside.load_log_decay(form, refs, rows, at)
        decays = state_decays(refs, g_cW, inside.Sums(refs, n, g_cW))
        q_cW, k_cW = inside.load_keys(refs, rows, at)
        outs.carry_GCH[at] = decays.carry_W
        outs.q_GPH[:, at] = (q_cW * decays.from_start_cW).astype(dtype)
        write_cW = rows.beta_c[:, None] * k_cW * decays.to_end_cW
        outs.write_GPH[:, at] = write_cW.astype(dtype)
        read_cW = (k_cW * decays.from_start_cW).astype(dtype)
        outs.k_GPH[:, at] = _gpu.dot(inverse_cc, read_cW).astype(dtype)

    def columns(n, _):
        at = (slice(None), pl.ds(pl.multiple_of(n * tiles.columns, tiles.columns), tiles.columns))
        v_cw = inside.rows(refs.v_ch[at], rows.real_c).astype(dtype)
        errors_ref[at] = _gpu.dot(inverse_cc, v_cw).astype(dtype)

    lax.fori_loop(0, refs.q_cH.shape[1] // tiles.prep_channels, channels, None)
    lax.fori_loop(0, errors_ref.shape[1] // tiles.columns, columns, None)


class Decays(NamedTuple):
    """Between the states at a chunk's ends and its rows; 0 where a border lies between."""

    from_start_cW: jax.Array
    to_end_cW: jax.Array
    carry_W: jax.Array


def state_decays(refs: Refs, g_cW: jax.Array, sums: inside.Sums) -> Decays:
    """Decays from the entry state to each row, from each row to the exit state, and over all."""
    ids_c, entry = refs.ids_c[...], refs.entry_1[0]
    c = ids_c.shape[0]
    last = refs.ids_c[c - 1]
    from_start_cW = jnp.exp(sums.over(inside.FROM_START))
    to_end_cW = jnp.exp(sums.over(inside.TO_END))
    return Decays(
        jnp.where((ids_c == entry)[:, None], from_start_cW, 0),
        jnp.where((ids_c == last)[:, None], to_end_cW, 0),
        jnp.where(entry == last, jnp.exp(jnp.sum(g_cW, axis=0)), 0),
    )
