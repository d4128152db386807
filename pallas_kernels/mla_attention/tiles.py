"""Tile sizes of mla_attention, and why."""

from typing import NamedTuple


class Tile(NamedTuple):
    """queries, keys: of one block of scores.

    warps, stages: of a GPU's program and its loops. bytes: of a TPU's on-chip memory.
    """

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2
    bytes: int | None = None

    def size(self, of_keys: bool) -> int:
        return self.keys if of_keys else self.queries


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


def tpu_tile_for(T: int, S: int) -> Tile:
    """Tile of every TPU kernel for T queries and S keys; compiled, not timed.

    512 x 512 scores in float32 are 1 MiB, as are the sums of 512 rows of 192 + 128 channels twice
    over; larger ones mean fewer steps, of which a skipped one still costs its start. Rows of 128
    numbers are the least that lie in one register.
    """
    least = lambda length: min(512, max(128, 1 << (length - 1).bit_length()))  # noqa: E731
    return Tile(least(T), least(S), bytes=32 << 20)
