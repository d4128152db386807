"""GPU kernel, first stage: all of a chunk that needs no entry state; chunks in parallel."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.kda import pallas_gpu_chunk as inside
from pallas_kernels.kda.pallas_gpu_chunk import Form, Refs
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


class Prepared(NamedTuple):
    """What the scans read; heads first."""

    w_GPH: jax.Array  # what the entry state is written over with: minus this times it
    q_GPH: jax.Array  # queries as they meet the entry state
    k_GPH: jax.Array  # keys as they reach the exit state
    carry_GCH: jax.Array  # decay from the entry state to the exit state


class Blocks:
    """Block specs of a grid (G, C): one head and one chunk a program."""

    def __init__(self, x: Inputs, tiles: Tiles):
        self.c = tiles.chunk
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
        ]  # fmt: skip


def prepare(form: Form, x: Inputs, tiles: Tiles, *, solved: jax.Array | None = None) -> Any:
    """Products of each chunk with itself.

    Args:
      solved: inverses [G, P, c] of an earlier call, which spare this one their making.
    Returns:
      `Prepared`; without `solved` also fresh values [G, P, h], scores and inverses [G, P, c].
    """
    blocks, dtype = Blocks(x, tiles), x.q_BPNH.dtype
    G, C = blocks.grid
    P, c, H = C * tiles.chunk, tiles.chunk, blocks.H
    tokens = lambda W: jax.ShapeDtypeStruct((G, P, W), dtype)  # noqa: E731
    shapes = [tokens(H)] * 3 + [jax.ShapeDtypeStruct((G, C, H), jnp.float32)]
    specs = [blocks.chunk(H)] * 3 + [blocks.one(H)]
    more = [] if solved is None else [solved]
    if solved is None:
        shapes += [tokens(blocks.h), tokens(c), tokens(c)]
        specs += [blocks.chunk(blocks.h), blocks.chunk(c), blocks.chunk(c)]

    def body(*refs):
        _prepare(form, tiles, dtype, Refs(*refs[: len(x)]), refs[len(x) :], solved is not None)

    outs = _gpu.call(
        body, name="kda_prep_again" if more else "kda_prep", grid=blocks.grid,
        in_specs=blocks.inputs() + [blocks.chunk(c)] * len(more), out_specs=specs,
        out_shape=shapes, warps=tiles.prep_warps, stages=tiles.stages,
    )(*x, *more)  # fmt: skip
    return Prepared(*outs) if more else (Prepared(*outs[:4]), *outs[4:])


def _prepare(form: Form, tiles: Tiles, dtype: Any, refs: Refs, others: Any, solved: bool) -> None:
    x = inside.load(form, refs)
    c = tiles.chunk
    sums = inside.Sums(x.g_cH)
    if solved:
        inverse_ref, w_ref, q_ref, k_ref, carry_ref = others
        inverse_cc = inverse_ref[...]
    else:
        w_ref, q_ref, k_ref, carry_ref, fresh_ref, scores_ref, inverse_ref = others
        scores_cc, strict_cc = inside.triangles(form, x, sums, dtype)
        scores_ref[...] = scores_cc.astype(dtype)
        inverse_cc = inside.unit_inverse(strict_cc, exact=dtype == jnp.float32).astype(dtype)
        inverse_ref[...] = inverse_cc
        _fresh(refs, x, inverse_cc, fresh_ref, tiles)
    from_start_cH, to_end_cH, carry_H = state_decays(refs, x, sums, c)
    carry_ref[...] = carry_H
    q_ref[...] = (x.q_cH * from_start_cH).astype(dtype)
    k_ref[...] = (x.k_cH * to_end_cH).astype(dtype)
    erase_cH = x.beta_c[:, None] * x.k_cH * from_start_cH
    w_ref[...] = _gpu.dot(inverse_cc, erase_cH.astype(dtype)).astype(dtype)


def _fresh(refs: Refs, x: inside.Chunk, inverse_cc: jax.Array, fresh_ref: Any, tiles: Tiles):
    """What the values write into an empty state, some columns at a time."""
    for first in range(0, fresh_ref.shape[1], tiles.columns):
        at = (slice(None), pl.ds(first, tiles.columns))
        v_cw = inside.rows(refs.v_ch[at], x.real_c) * x.beta_c[:, None]
        fresh_cw = _gpu.dot(inverse_cc, v_cw.astype(inverse_cc.dtype))
        fresh_ref[at] = fresh_cw.astype(fresh_ref.dtype)


def state_decays(refs: Refs, x: inside.Chunk, sums: inside.Sums, c: int):
    """Decay from the entry state to each row, from each row to the exit state, from state to state.

    Zero where a border of documents lies between.
    """
    entry, last = refs.entry_1[0], refs.ids_c[c - 1]
    ids_c = refs.ids_c[...]
    # masked before exp is called too, lest a document's bits depend on its neighbours
    meets = (ids_c == entry)[:, None]
    from_start = jnp.where(meets, jnp.exp(sums.over(inside.from_start(c))), 0)
    reaches = (ids_c == last)[:, None]
    to_end = jnp.where(reaches, jnp.exp(sums.over(inside.to_end(c))), 0)
    whole_H = jnp.exp(jnp.sum(x.g_cH, axis=0))
    return from_start, to_end, jnp.where(entry == last, whole_H, 0)
