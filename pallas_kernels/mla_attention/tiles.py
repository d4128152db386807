"""Tile sizes of mla_attention, and why."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable

# Of a TPU's on-chip memory; the compiler's own limit is half of it.
TPU_BYTES = 32 << 20


class Tile(NamedTuple):
    """queries, keys: of one block of scores. warps, stages: of a GPU's program and its loops."""

    queries: int
    keys: int
    warps: int = 8
    stages: int = 2

    def size(self, of_keys: bool) -> int:
        return self.keys if of_keys else self.queries


class Tiles(NamedTuple):
    """One `Tile` a GPU kernel: output; gradients of queries; gradients of keys and values."""

    forward: Tile
    queries: Tile
    keys: Tile


@tunable
def tiles_for(H: int, h: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for heads of H and values of h channels on GPUs; compiled, not timed.

    With 256 threads, sums of 128 queries by 128 channels in float32 are 64 registers of a thread,
    by 192 are 96, and scores of 128 x 64 are 32. A tile of keys owns sums of both its gradients,
    320 channels wide: 64 keys are 80 registers, 128 would be 160 beside 64 for scores. Queries of
    192 channels (48 KB) and two stages of keys and values (2 x 40 KB) fit shared memory.
    In float32, or for wider heads, everything takes twice the room, and tiles are half as large.
    """
    del chip
    if itemsize > 2 or H + h > 384:
        return Tiles(Tile(64, 32), Tile(64, 32), Tile(32, 64))
    return Tiles(Tile(128, 64), Tile(128, 64), Tile(64, 64))


@tunable
def tpu_tile_for(T: int, S: int, chip: str = "v5p") -> Tile:
    """Tile of every TPU kernel for T queries and S keys; compiled, not timed.

    512 x 512 scores in float32 are 1 MiB of on-chip memory; larger ones mean fewer steps, of which
    a skipped one still costs its start. 128 numbers are the least that lie in a register.
    """
    del chip
    least = lambda length: min(512, max(128, 1 << (length - 1).bit_length()))  # noqa: E731
    return Tile(least(T), least(S))
