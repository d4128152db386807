"""Grouped matmul on TPUs, in Pallas' Mosaic form: `differentiated` with the kernels beside it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _tpu
from pallas_kernels.grouped_matmul import (
    differentiated,
    pallas_tpu_rows,
    pallas_tpu_weights,
    tiles,
    worklist,
)

_LANES = 128


def grouped_matmul(rows_RK, weights, group_sizes_E, *, activation, situ_betas, lora_scale):
    """As `chunked.grouped_matmul`; sizes of tiles are those of `tiles`.

    Raises:
      NotImplementedError: a dtype other than float32 and bfloat16, or more than one; packed weights
        whose K has no tile; gate and up side by side, of which one has no whole tiles of lanes.
    """
    differentiated.check(rows_RK, weights)
    width = weights["base"].shape[2] // (1 if activation is None else 2)
    if activation is not None and width % _LANES and not _tpu.interpreted():
        raise NotImplementedError(f"gate and up of {width} columns, not a multiple of {_LANES}")
    if rows_RK.shape[0] == 0:
        return jnp.zeros((0, width), rows_RK.dtype)
    mode = differentiated.Mode(_ENGINE, activation, situ_betas, lora_scale)
    return differentiated.grouped_matmul(mode, rows_RK, weights, group_sizes_E)


class Plan(NamedTuple):
    """Bounds of the groups; visits of tiles of rows, those of no group behind."""

    bounds: worklist.Bounds
    items_5L: jax.Array
    tile_rows: int


def _plan(group_sizes_E, num_rows):
    num_groups = group_sizes_E.shape[0]
    tile_rows = tiles.rows_of_visit(num_rows // num_groups)
    bounds = worklist.bounds_of(group_sizes_E)
    whole = -(-num_rows // tile_rows) * tile_rows
    items_4L = worklist.visits(worklist.with_tail(bounds, whole), whole, tile_rows)
    # Rows of no group are not read, nor is a weight: the next visit finds there what it had.
    item_L = jnp.arange(items_4L.shape[1], dtype=jnp.int32)
    real = jnp.sum(items_4L[0] < num_groups, dtype=jnp.int32)
    read_L = jnp.minimum(item_L, jnp.maximum(real - 1, 0))
    return Plan(bounds, jnp.concatenate([items_4L, read_L[None]]), tile_rows)


def _rows(
    plan, x_RD, weight, *, name, across=False, activation=None, betas=(), low=None, d_out=None,
    scale=1.0,
):  # fmt: skip
    parts = [w if w.ndim == 3 else w[None] for w in weight.values()]
    packed = len(parts) == 2
    num_k, num_f = parts[0].shape[1] * (2 if packed else 1), parts[0].shape[2]
    depth, width = (num_f, num_k) if across else (num_k, num_f)
    if activation is not None:
        width //= 2
    other = None if low is None else low[1] if low[1].ndim == 3 else low[1][None]
    count = 1 if activation is None else 2
    tile_cols = tiles.cols_of_visit(depth * count, width, x_RD.dtype, packed and across)
    if packed:
        parts[1] = parts[1].astype(jnp.int32)  # bytes come in tiles of 32, these of 8
    if packed and not across:  # unpacked weights are even ones along K, then odd ones
        x_RD = _parted(x_RD, num_k)
    if packed and across and other is not None:
        other = _parted(other.swapaxes(1, 2), tile_cols).swapaxes(1, 2)
    call = pallas_tpu_rows.Product(
        num_groups=plan.bounds.first.shape[0], depth=depth, width=width, across=across,
        offsets=(0,) * count, activation=activation, betas=betas, backward=d_out is not None,
        packed=packed, adapted=low is not None, scale=scale, tile_rows=plan.tile_rows,
        tile_cols=tile_cols,
    )  # fmt: skip
    weights = [tuple(parts)] * count
    others = None if other is None else [other] * count
    if count == 2 and width % tile_cols == 0:
        call = call._replace(offsets=(0, width // tile_cols))
    elif count == 2:  # no tile begins where the ups do, so they are copied
        halves = slice(None, width), slice(width, None)
        weights = [tuple(p[:, :, half] for p in parts) for half in halves]
        if other is not None:
            others = [other[:, :, half] for half in halves]
    out = pallas_tpu_rows.run(
        call, plan.items_5L, x_RD, weights, low and low[0], others, d_out, name=name
    )
    if packed and across:
        return _joined(out[0], tile_cols)
    return jnp.concatenate(out, axis=1) if len(out) == 2 else out[0]


def _parted(x, size):
    """Of every `size` columns the even ones, then the odd ones."""
    return x.reshape(*x.shape[:-1], -1, size // 2, 2).swapaxes(-1, -2).reshape(x.shape)


def _joined(x, size):
    """Undoes `_parted`."""
    return x.reshape(*x.shape[:-1], -1, 2, size // 2).swapaxes(-1, -2).reshape(x.shape)


def _weights(plan, x_RK, d_RF, *, name, dtype, shared):
    bounds, num_rows = plan.bounds, x_RK.shape[0]
    if shared:  # one group of all rows that have one
        bounds = worklist.Bounds(bounds.first[:1], bounds.end[-1:])
    whole = -(-num_rows // plan.tile_rows) * plan.tile_rows
    items_4L = worklist.visits(bounds, whole, plan.tile_rows, empty_too=True)
    tile = plan.tile_rows, *tiles.area_of_gradient(x_RK.shape[1], d_RF.shape[1])
    num_groups = bounds.first.shape[0]
    out = pallas_tpu_weights.run(x_RK, d_RF, items_4L, num_groups, tile, dtype, name=name)
    return out[0] if shared else out


_ENGINE = differentiated.Engine(_plan, _rows, _weights)
