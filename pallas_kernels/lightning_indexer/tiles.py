"""How much of the indexer one program does, and how many queries are scored at once."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """query, key: a tile of scores. warps, stages: of its program.

    few: up to so many queries, all heads of one query are one tile.
    select: scores of a row that one program keeps in registers. select_warps: of that program.
    block_bytes: scores that exist at a time; block_queries: the fewest and the most of a block.
    """

    query: int
    key: int
    warps: int
    stages: int
    few: int
    select: int
    select_warps: int
    block_bytes: int
    block_queries: tuple[int, int]


def tiles_for(head_dim: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for heads of `head_dim`; reasoned and compiled, none is measured on a GPU yet.

    Query tile: 64, the least that large matrix instructions take. Key tile: 128 with 8 warps take
    128 registers a thread, so that two programs share a multiprocessor and one multiplies while the
    other sums over heads; 256 keys would read q half as often, but take 219 registers, one program.
    Select: 64 scores a thread of 8 warps in 96 registers, so that the search for the border reads
    no memory and two programs share a multiprocessor. Block: its scores are read twice more, so
    they should still be in the cache (40 of 50 MB), but fewer rows than multiprocessors would leave
    some without one to select from.
    """
    del chip
    wide = head_dim * itemsize > 256
    return Tiles(
        query=64, key=128, warps=8, stages=2 if wide else 3, few=8, select=16384, select_warps=8,
        block_bytes=40 << 20, block_queries=(128, 1024),
    )  # fmt: skip


class TpuTile(NamedTuple):
    """queries, keys: of a tile of scores."""

    queries: int
    keys: int


def tpu_tile_for(num_keys: int) -> TpuTile:
    """Whole lanes both ways, so that a tile can be turned; shorter arrays take fewer keys.

    128 queries of 64 heads of 128 are 2 MB, twice that with the next ones on their way; 512 keys do
    as many products with each of their bytes, more than any TPU needs to be busy.
    """
    return TpuTile(128, min(512, -(-num_keys // 128) * 128))
