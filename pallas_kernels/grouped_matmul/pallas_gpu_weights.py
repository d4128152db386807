"""Kernel on GPUs: the gradient of every group's weight, a sum over the group's rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.grouped_matmul.tiles import Tiles
from pallas_kernels.grouped_matmul.worklist import Bounds

# Tiles along K that run side by side under one tile of columns, so that both operands are read
# from the second-level cache: 8 x 128 + 16 x 256 columns of the rows that are in work.
NEIGHBOURS = 8


def run(
    x_RK: jax.Array, d_RF: jax.Array, bounds: Bounds, tiles: Tiles, dtype: Any, *, name: str
) -> jax.Array:
    """sum over r in e of x[r, k] d[r, f]: [E, K, F] in `dtype`, zeros for a group without rows.

    Args:
      x_RK, d_RF: factors; rows of no group may hold anything.
      bounds: of the groups.
    """
    bounds_2E = jnp.stack(bounds)
    num_groups, (num_k, num_f) = bounds_2E.shape[1], (x_RK.shape[1], d_RF.shape[1])
    blocks = -(-num_k // (tiles.depth * NEIGHBOURS))
    out = _gpu.call(
        functools.partial(_body, tiles, (num_k, num_f), blocks),
        name=name,
        grid=(NEIGHBOURS, -(-num_f // tiles.cols), blocks * num_groups),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_groups * num_k, num_f), dtype),
        warps=tiles.warps,
        stages=tiles.stages,
    )(bounds_2E, x_RK, d_RF)
    return out.reshape(num_groups, num_k, num_f)


def _body(
    tiles: Tiles, limits: tuple[int, int], blocks: int, bounds_ref: Any, x_ref: Any, d_ref: Any,
    out_ref: Any,
) -> None:  # fmt: skip
    num_k, num_f = limits
    group, block = pl.program_id(2) // blocks, pl.program_id(2) % blocks
    k = (block * NEIGHBOURS + pl.program_id(0)) * tiles.depth
    f = pl.program_id(1) * tiles.cols
    own_k = k + lax.iota(jnp.int32, tiles.depth) < num_k
    own_f = f + lax.iota(jnp.int32, tiles.cols) < num_f
    first, end = bounds_ref[0, group], bounds_ref[1, group]

    def step(i: Any, total: jax.Array) -> jax.Array:
        row = first + i * tiles.rows
        mine_r1 = (row + lax.iota(jnp.int32, tiles.rows) < end)[:, None]
        rows = pl.ds(row, tiles.rows)
        # masked on both sides, since 0 * NaN is NaN in the sum over rows
        x = _gpu.load(x_ref.at[rows, pl.ds(k, tiles.depth)], mine_r1 & own_k[None, :])
        d = _gpu.load(d_ref.at[rows, pl.ds(f, tiles.cols)], mine_r1 & own_f[None, :])
        return total + _gpu.dot(x, d, trans_a=True)

    # tiles past K belong to nobody: they take no step
    steps = (k < num_k).astype(jnp.int32) * -(-(end - first) // tiles.rows)
    total = jnp.zeros((tiles.depth, tiles.cols), jnp.float32)
    total = lax.fori_loop(jnp.int32(0), steps, step, total)
    at = pl.ds(group * num_k + k, tiles.depth), pl.ds(f, tiles.cols)
    _gpu.store(out_ref.at[at], total, own_k[:, None] & own_f[None, :])
