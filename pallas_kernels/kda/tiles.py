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
        At 32 on an H200 states spill 24 bytes, pairs some hundreds.
      columns: of the state and the values that one program of a scan carries. They are independent,
        so fewer of them mean more programs: at 64, 96 heads of 128 are 192, on 132 processors.
      prep_warps, scan_warps, states_warps, pairs_warps: of a program, 32 threads each. Pairs spill
        260 bytes with 8 on an H200: each warp group holds as much of a product's left factor.
      stages, pairs_stages: of the software pipeline of loops; that of pairs, small products of what
        the loop has just made, gains nothing from one and would take 98 KB for it.
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
    pairs_stages: int = 1


@tunable
def tiles_for(H: int, h: int, chip: str = "h200") -> Tiles:
    """Tiles for keys of H and values of h channels; compiled, not timed.

    Blackwell's sums lie in a memory of their own and not in registers, so that states take twice
    the channels at once there, which halves how often they read errors and gradients of values.
    Pairs do not: both gates fit with 16 channels and 8 warps, in 128 registers.
    """
    tiles = Tiles(prep_channels=min(32, H), columns=min(64, h))
    if any(name in chip for name in ("b100", "b200", "b300")):
        return tiles._replace(states_channels=min(32, H), pairs_warps=8)
    return tiles
