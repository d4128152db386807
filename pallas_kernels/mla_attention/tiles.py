"""Tile sizes of mla_attention, and why."""

from typing import NamedTuple


class Tile(NamedTuple):
    """queries, keys: of one block of scores. warps, stages: of a GPU's program and its loops."""

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2


class Tiles(NamedTuple):
    """One `Tile` a kernel: output; gradients of queries; gradients of keys and values."""

    forward: Tile
    queries: Tile
    keys: Tile


def tiles_for(H: int, h: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for heads of H and values of h channels; compiled, not timed."""
    del chip
    if itemsize > 2 or H + h > 384:
        return Tiles(Tile(64, 32), Tile(64, 32), Tile(32, 64))
    return Tiles(Tile(128, 64), Tile(128, 64), Tile(64, 64))
