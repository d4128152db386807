"""Tile sizes of sparse_flash_attention on GPUs, and why."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable

# That p and ds of a block of queries may take in memory: at K3.1's sizes those of 256 queries, or
# 512 programs of the kernel that makes them, on 132 processors.
SCORES_BYTES = 256 << 20


class Tile(NamedTuple):
    """heads, keys: of a block of scores. warps, stages: of a GPU's program and its loops."""

    heads: int
    keys: int
    warps: int = 8
    stages: int = 2


class Tiles(NamedTuple):
    """One `Tile` a kernel.

    forward: of the output. scores: of the probabilities and their gradients. columns: of the
    gradients, whose `heads` stand for a program's columns; its keys are a multiple of those of
    `scores`.
    """

    forward: Tile
    scores: Tile
    columns: Tile


@tunable
def tiles_for(C: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for a latent of C channels; compiled, not timed.

    64 heads are the least rows of Hopper's large instructions, and 64 x 512 sums in float32 are
    128 registers of 256 threads, so a program cannot have more. Its queries take 72 KB of shared
    memory and a tile of 64 rows as much, twice in flight: 216 of 227 KB.
    scores: dout lies beside the queries (136 KB), so that only 32 rows (2 x 36 KB) fit beside them.
    columns: 64 x 128 sums of rows and 128 x 96 of queries are 80 registers.
    Blackwell keeps sums in a memory of its own and rescales them by way of shared memory, 128 KB.
    """
    blackwell = any(name in chip for name in ("b100", "b200", "b300"))
    if itemsize > 2:
        return Tiles(Tile(32, 32, stages=1), Tile(16, 32, stages=1), Tile(min(C, 64), 64, stages=1))
    forward = Tile(64, 32 if blackwell else 64)
    return Tiles(forward, Tile(64, 32, warps=4), Tile(min(C, 128), 64))
