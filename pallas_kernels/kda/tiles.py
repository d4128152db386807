"""Tile sizes of the GPU kernels, and why."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """What a kernel of `kda` is cut into.

    Attributes:
      chunk: positions whose pairs are one matrix; 64 rows are the least that a Hopper warp group
        multiplies at once, and 128 would take four times the registers for pairs.
      channels: of keys that are handled at once; a tile of 64 x 64 numbers takes 16 registers a
        thread with 8 warps, and a gradient has about ten of them.
      columns: of the state and the values that one program of a scan carries. They are independent,
        so fewer of them mean more programs: at 64, 96 heads of 128 are 192, on 132 processors.
      prep_warps, scan_warps, grads_warps: of a program, 32 threads each.
      stages: of the software pipeline of loops.
    """

    chunk: int = 64
    channels: int = 32
    columns: int = 64
    prep_warps: int = 8
    scan_warps: int = 4
    grads_warps: int = 8
    stages: int = 2


@tunable
def tiles_for(H: int, h: int) -> Tiles:
    """Tiles for keys of H and values of h channels; compiled, not timed."""
    return Tiles(channels=min(32, H), columns=min(64, h))
