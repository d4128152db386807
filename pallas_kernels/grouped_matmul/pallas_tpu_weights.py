"""Kernel on TPUs: the gradient of every group's weight, a sum over the group's rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu
from pallas_kernels.grouped_matmul.pallas_tpu_rows import VMEM_BYTES


def run(
    x_RK: jax.Array, d_RF: jax.Array, items_4L: jax.Array, num_groups: int,
    tile: tuple[int, int, int], dtype: Any, *, name: str,
) -> jax.Array:  # fmt: skip
    """sum over r in e of x[r, k] d[r, f]: [E, K, F] in `dtype`, zeros for a group without rows.

    Args:
      x_RK, d_RF: factors; rows of no group may hold anything.
      items_4L: `worklist.visits`, every group at least once.
      tile: rows, columns of x, columns of d.
    """
    bm, bk, bf = tile
    num_k, num_f = x_RK.shape[1], d_RF.shape[1]
    return _tpu.call(
        functools.partial(_body, bm),
        name=name,
        grid=(-(-num_k // bk), -(-num_f // bf), items_4L.shape[1]),
        in_specs=[
            pl.BlockSpec((bm, bk), lambda k, f, i, t: (t[1, i], k)),
            pl.BlockSpec((bm, bf), lambda k, f, i, t: (t[1, i], f)),
        ],
        out_specs=pl.BlockSpec((None, bk, bf), lambda k, f, i, t: (t[0, i], k, f)),
        out_shape=jax.ShapeDtypeStruct((num_groups, num_k, num_f), dtype),
        parallel=2,
        num_prefetch=1,
        scratch=[pltpu.VMEM((bk, bf), jnp.float32)],
        vmem_bytes=VMEM_BYTES,
    )(items_4L, x_RK, d_RF)


def _body(bm: int, items_ref: Any, x_ref: Any, d_ref: Any, out_ref: Any, total_ref: Any) -> None:
    i, last = pl.program_id(2), pl.num_programs(2) - 1
    group, tile, first, end = (items_ref[row, i] for row in range(4))

    @pl.when((i == 0) | (items_ref[0, jnp.maximum(i - 1, 0)] != group))
    def clear():
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(first < end)
    def add():
        # masked on both sides, since 0 * NaN is NaN in the sum over rows
        x, d = (_own_rows(ref[...], tile * bm, first, end) for ref in (x_ref, d_ref))
        total_ref[...] += _tpu.dot(x, d, trans_a=True)

    @pl.when((i == last) | (items_ref[0, jnp.minimum(i + 1, last)] != group))
    def finish():
        out_ref[...] = total_ref[...].astype(out_ref.dtype)


def _own_rows(value: jax.Array, start: Any, first: Any, end: Any) -> jax.Array:
    """The rows `start`, `start + 1`, ... that lie in [first, end); zeros for the others."""
    row = start + lax.broadcasted_iota(jnp.int32, value.shape, 0)
    return jnp.where((row >= first) & (row < end), value, jnp.zeros((), value.dtype))
