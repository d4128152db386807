"""Tile sizes of the kernels of grouped_matmul, and why."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """Of one kernel.

    Attributes:
      rows: of a tile (of a step of the loop, in the kernel that sums over rows).
      cols: columns of a tile of the result.
      depth: of the summed dim in a step (rows of the result, in the kernel that sums over rows).
      warps, stages: of a GPU's program, and of its pipeline.
    """

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


class Sizes(NamedTuple):
    """What the choice depends on.

    Attributes:
      mean_rows: of a group.
      depth: summed dim (of the kernel that sums over rows: K).
      cols: columns of the result.
      dtype: of the rows.
      gated: two columns of the weight make one of the result.
      backward: the gradients of those two are the result.
      packed: the weight is MXFP4.
      adapted: the product of a second pair of factors is added.
    """

    mean_rows: int
    depth: int
    cols: int
    dtype: Any
    gated: bool = False
    backward: bool = False
    packed: bool = False
    adapted: bool = False


def power_of_two_from(n: int, least: int = 16) -> int:
    """Smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def rows_of_tile(mean_rows: int) -> int:
    """Rows of a tile of the kernel that multiplies rows by their group's weight.

    64 rows are the least that Hopper's large instructions take; below them a group is so small that
    reading its weight is the time, and the unused rows of a tile are only waste.
    """
    return 128 if mean_rows >= 192 else min(64, power_of_two_from(mean_rows))


@tunable
def tiles_for(sizes: Sizes, chip: str = "h200") -> Tiles:
    """Of the GPU kernel that multiplies rows by their group's weight; compiled, not timed."""
    blackwell = any(name in chip for name in ("b100", "b200", "b300"))
    rows = rows_of_tile(sizes.mean_rows)
    wide = jnp.dtype(sizes.dtype).itemsize == 4
    # 128 x 256 sums in float32 over 256 threads are 128 registers each, the most that leaves room;
    # unpacking needs as many again for its bits, so half of that, and so do the backward's adapters
    # and float32; on Blackwell all of the backward, as its large instructions take 8 warps at most.
    crowded = sizes.backward and (sizes.adapted or wide or blackwell) and rows >= 64
    half = sizes.packed or crowded
    cols = 128 if half else 256
    cols = min(cols // (2 if sizes.gated else 1), power_of_two_from(sizes.cols))
    # 48 KB a step in bfloat16: 4 steps are 192 of 227 KB of shared memory.
    depth = min(32 if wide else 64, power_of_two_from(sizes.depth, 32 if sizes.packed else 16))
    # The cotangent's tile comes to the sums: with 256 threads they spill, with 512 they do not.
    area = rows * cols * (2 if sizes.gated else 1)
    warps = 4 if area < 128 * 64 and not sizes.packed else 8
    if sizes.backward and area == 128 * 256:
        warps = 16
    return Tiles(rows, cols, depth, warps, 4)


@tunable
def tiles_for_gradient(sizes: Sizes, chip: str = "h200") -> Tiles:
    """Of the GPU kernel that sums over a group's rows, `depth` x `cols` of a weight's gradient."""
    del chip
    wide = jnp.dtype(sizes.dtype).itemsize == 4
    rows = 32 if wide or sizes.mean_rows < 64 else 64  # as the depth above
    depth = min(128, power_of_two_from(sizes.depth))
    cols = min(256, power_of_two_from(sizes.cols))
    # 16 x 256 of an adapter too: with 4 warps it spills on Blackwell
    return Tiles(rows, cols, depth, 8 if cols > 128 or depth * cols >= 128 * 128 else 4, 4)


def rows_of_visit(mean_rows: int) -> int:
    """Rows of a tile on TPUs: a group begins anywhere, so about one more tile a group is visited.

    Half of the mean group wastes a half at most; a TPU's array takes 128 or 256 rows at a time, and
    bfloat16 comes in 16s.
    """
    return min(256, max(16, 1 << (max(mean_rows // 2, 1).bit_length() - 1)))


# Of one buffer of weights in a TPU's VMEM; there are two, beside as many of rows and of results.
_WEIGHT_BYTES = 6 << 20


def cols_of_visit(depth: int, width: int, dtype: Any, packed_rows: bool) -> int:
    """Columns of a tile on TPUs, whose depth is whole: a weight is read once for all its rows.

    Args:
      depth: of all weights in a tile together.
      packed_rows: a tile is rows of packed weights, 32 to a scale, and scales come in 8s.
    Raises:
      NotImplementedError: packed weights too large for one tile and no multiple of 256 along K.
    """
    most = _WEIGHT_BYTES // (depth * jnp.dtype(dtype).itemsize)
    if packed_rows:
        if width <= most:
            return width
        fitting = [n for n in range(256, most + 1, 256) if width % n == 0]
        if not fitting:
            raise NotImplementedError(f"no tile divides {width} packed weights")
        return fitting[-1]
    if width <= min(most, 1024) and width % 128:
        return width
    most = max(128, min(most, 1024) // 128 * 128)
    fitting = [n for n in range(128, most + 1, 128) if width % n == 0]
    return fitting[-1] if fitting and fitting[-1] * 2 > most else most


def area_of_gradient(num_k: int, num_f: int) -> tuple[int, int]:
    """Columns of both factors of a weight's gradient on TPUs: its float32 sums are 4 MB at most."""
    return min(num_k, 1024), min(num_f, 1024)
