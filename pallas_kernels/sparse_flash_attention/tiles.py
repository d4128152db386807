"""Tile sizes of sparse_flash_attention on GPUs, and why."""

from typing import NamedTuple


class Tile(NamedTuple):
    """heads, keys: of a block of scores. warps, stages: of a GPU's program and its loops."""

    heads: int
    keys: int
    warps: int = 8
    stages: int = 2


class Tiles(NamedTuple):
    """One `Tile` a kernel.

    forward: of the output. scores: of the probabilities and their gradients. columns: of the
      gradients, whose `heads` stand for a program's columns.
    bytes: that the scores of a block of queries may take in memory.
    """

    forward: Tile
    scores: Tile
    columns: Tile
    bytes: int = 256 << 20


def tiles_for(C: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for a latent of C channels; compiled, not timed."""
    del chip
    if itemsize > 2:
        return Tiles(Tile(32, 32, stages=1), Tile(16, 32, stages=1), Tile(min(C, 64), 64, stages=1))
    return Tiles(Tile(64, 64), Tile(64, 32, warps=4), Tile(min(C, 128), 64))
