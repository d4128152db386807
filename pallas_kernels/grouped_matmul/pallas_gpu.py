"""Grouped matmul on GPUs, in Pallas' Triton form: `differentiated` with the kernels beside it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.choose import target_chip
from pallas_kernels.grouped_matmul import (
    differentiated,
    pallas_gpu_rows,
    pallas_gpu_weights,
    worklist,
)
from pallas_kernels.grouped_matmul.tiles import (
    Sizes,
    power_of_two_from,
    tiles_for,
    tiles_for_gradient,
)

# Rows whose sum one program forms where all groups share a factor: 64 of them at 65,536 rows.
SHARED_PIECE = 1024


def grouped_matmul(rows_RK, weights, group_sizes_E, *, activation, situ_betas, lora_scale):
    """As `chunked.grouped_matmul`; sizes of tiles are those of `tiles`.

    Raises:
      NotImplementedError: a dtype other than float32 and bfloat16, or more than one; packed
        weights between 2 and 4 GiB.
    """
    differentiated.check(rows_RK, weights)
    if "scales" in weights and 2**31 < weights["base"].size <= 2**32:
        raise NotImplementedError(
            "packed weights of 2 to 4 GiB: the backend counts their bytes in 32 bits with a sign"
        )
    if rows_RK.shape[0] == 0:
        width = weights["base"].shape[2] // (1 if activation is None else 2)
        return jnp.zeros((0, width), rows_RK.dtype)
    mode = differentiated.Mode(_ENGINE, activation, situ_betas, lora_scale)
    return differentiated.grouped_matmul(mode, rows_RK, _with_rank(weights), group_sizes_E)


def _with_rank(weights):
    """Adapters with zeros up to a rank that a product takes, a power of two from 16 on."""
    if "a" not in weights:
        return weights
    a, b = weights["a"], weights["b"]
    more = power_of_two_from(a.shape[-1]) - a.shape[-1]
    if not more:
        return weights
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, more)])
    return weights | {"a": a, "b": jnp.pad(b, [(0, 0), (0, more), (0, 0)])}


class Plan(NamedTuple):
    """Bounds of the groups, and how many rows there are, and in the mean group."""

    bounds: worklist.Bounds
    num_rows: int
    mean_rows: int

    def items(self, tile_rows: int) -> jax.Array:
        """Tiles of rows, those of no group behind; a compiler builds lists that are alike once."""
        return worklist.tiles(
            worklist.with_tail(self.bounds, self.num_rows), self.num_rows, tile_rows,
            pallas_gpu_rows.NEIGHBOURS,
        )  # fmt: skip


def _plan(group_sizes_E, num_rows):
    bounds = worklist.bounds_of(group_sizes_E)
    return Plan(bounds, num_rows, num_rows // group_sizes_E.shape[0])


def _rows(
    plan, x_RD, weight, *, name, across=False, activation=None, betas=(), low=None, d_out=None,
    scale=1.0,
):  # fmt: skip
    base = weight["base"]
    packed = "scales" in weight
    num_k, num_f = base.shape[-2] * (2 if packed else 1), base.shape[-1]
    depth, width = (num_f, num_k) if across else (num_k, num_f)
    pieces = (0,) if activation is None else (0, width // 2)
    sizes = Sizes(
        plan.mean_rows, depth, width // len(pieces), x_RD.dtype, gated=activation is not None,
        backward=d_out is not None, packed=packed, adapted=low is not None,
    )  # fmt: skip
    tiles = tiles_for(sizes, target_chip())
    call = pallas_gpu_rows.Product(
        num_groups=plan.bounds.first.shape[0], depth=depth, width=width, across=across,
        pieces=pieces, activation=activation, betas=betas, backward=d_out is not None,
        rank=0 if low is None else low[0].shape[1], scale=scale, shared_weight=base.ndim == 2,
        shared_low=low is not None and low[1].ndim == 2, tiles=tiles,
    )  # fmt: skip
    flat = tuple(w.reshape(-1, num_f) for w in weight.values())
    if low is not None:
        low = low[0], low[1].reshape(-1, low[1].shape[-1])
    return pallas_gpu_rows.run(call, plan.items(tiles.rows), x_RD, flat, low, d_out, name=name)


def _weights(plan, x_RK, d_RF, *, name, dtype, shared):
    sizes = Sizes(plan.mean_rows, x_RK.shape[1], d_RF.shape[1], x_RK.dtype)
    tiles = tiles_for_gradient(sizes, target_chip())
    if not shared:
        return pallas_gpu_weights.run(x_RK, d_RF, plan.bounds, tiles, dtype, name=name)
    pieces = worklist.pieces_of(x_RK.shape[0], plan.bounds.end[-1], SHARED_PIECE)
    parts = pallas_gpu_weights.run(x_RK, d_RF, pieces, tiles, jnp.float32, name=name)
    return jnp.sum(parts, axis=0).astype(dtype)


_ENGINE = differentiated.Engine(_plan, _rows, _weights)
