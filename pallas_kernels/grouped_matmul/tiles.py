"""Tile sizes of the kernels of grouped_matmul, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp


class Tiles(NamedTuple):
    """Of one kernel.

    Attributes:
      rows: of a tile (of a step of the loop, in the kernel that sums over rows).
      cols: columns of a tile of the result.
      depth: of the summed dim in a step (rows of the result, in the kernel that sums over rows).
      warps, stages: of a GPU's program; the depth of its pipeline.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """What the choice depends on: the mean group, the summed dim, the columns, the dtype."""

    mean_rows: int
    depth: int
    cols: int
    dtype: Any
    gated: bool = False
    packed: bool = False


def power_of_two_from(n: int, least: int = 16) -> int:
    """Smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def rows_of_tile(mean_rows: int) -> int:
    """Rows of a tile of the kernel that multiplies rows by their group's weight.

    64 rows are the least that Hopper's large instructions take; below them a group is so small that
    reading its weight is the time, and the unused rows of a tile are only waste.
    """
    return 128 if mean_rows >= 192 else min(64, power_of_two_from(mean_rows))


def tiles_for_rows(sizes: Sizes, chip: str = "h200") -> Tiles:
    """Of the kernel that multiplies rows by their group's weight.

    `cols` counts each of the two weights where an activation joins them.
    """
    del chip  # one table: what fits the registers of Hopper fits Blackwell's
    rows = rows_of_tile(sizes.mean_rows)
    # 128 x 256 float32 sums over 256 threads are 128 registers each, the most that leaves room.
    cols = 256 if rows >= 64 else 128
    if sizes.gated:
        cols //= 2
    cols = min(cols, power_of_two_from(sizes.cols))
    # 48 KB a step: 4 steps fill 192 of the 227 KB of shared memory.
    wide = jnp.dtype(sizes.dtype).itemsize == 4
    depth = min(32 if wide else 64, power_of_two_from(sizes.depth, 32 if sizes.packed else 16))
    return Tiles(rows, cols, depth, 8 if rows >= 64 and cols >= 128 // (1 + sizes.gated) else 4, 4)


def tiles_for_weights(sizes: Sizes, chip: str = "h200") -> Tiles:
    """Of the kernel that sums over a group's rows: `depth` x `cols` of a weight's gradient."""
    del chip
    wide = jnp.dtype(sizes.dtype).itemsize == 4
    rows = 32 if wide or sizes.mean_rows < 64 else 64
    depth = min(128, power_of_two_from(sizes.depth))
    cols = min(256, power_of_two_from(sizes.cols))
    return Tiles(rows, cols, depth, 8 if depth * cols >= 128 * 128 else 4, 4)
