"""Tile sizes of the GPU kernels, and why."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """What a kernel of `kda` is cut into.

    Attributes:
      chunk: positions whose pairs are one matrix; 64 rows are the least that a Hopper warp group
        multiplies at once, and 128 would take four times the registers for pairs.
      prep_channels, states_channels, pairs_channels: of keys that a kernel handles at once; a tile
        of 64 x 64 numbers takes 16 registers a thread with 8 warps, and a gradient has about ten.
      columns: of the state and the values that one program of a scan carries. They are independent,
        so fewer of them mean more programs: at 64, 96 heads of 128 are 192, on 132 processors.
      prep_warps, scan_warps, states_warps, pairs_warps: of a program, 32 threads each.
      stages, states_stages, pairs_stages: of the software pipeline of loops.
    """

    chunk: int = 64
    prep_channels: int = 32
    states_channels: int = 16
    pairs_channels: int = 16
    columns: int = 64
    prep_warps: int = 8
    scan_warps: int = 4
    states_warps: int = 8
    pairs_warps: int = 4
    stages: int = 2
    states_stages: int = 2
    pairs_stages: int = 1


@tunable
def tiles_for(H: int, h: int, chip: str = "h200") -> Tiles:
    """Tiles for keys of H and values of h channels; compiled, not timed."""
    del chip
    return Tiles(prep_channels=min(32, H), columns=min(64, h))
