"""How much of indexer_kl one program of a GPU does, and how many queries at once."""

from typing import NamedTuple


class Tile(NamedTuple):
    """rows: heads or queries. keys: at a time. warps, stages: of the program."""

    rows: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One tile of each kernel.

    target, chosen, chosen_grad: of the sparse stage. dense_target, dq, dk: of the dense one.
    block_bytes, block_queries: bytes of [t, keys] in float32 at a time, and the most queries.
    programs: as many as keep a chip busy; fewer key tiles than that share heads out.
    """

    target: Tile
    chosen: Tile
    chosen_grad: Tile
    dense_target: Tile
    dq: Tile
    dk: Tile
    block_bytes: int
    block_queries: int
    programs: int


def tiles_for(itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for inputs of `itemsize` bytes; reasoned and compiled, none is measured on a GPU yet.

    Rows are 64 where large matrix instructions should take them. Target: 64 heads of 576 and 64
    rows of 576 are 147 KB of shared memory in 16 bits; so 96 heads are two programs that fetch the
    same rows, the second from the cache. In float32 a quarter of the keys fit. Chosen: all heads of
    a query, for a row is fetched once for all of them; with 64 keys their gradient spills.
    """
    del chip
    low = itemsize == 2
    return Tiles(
        target=Tile(64, 64 if low else 16, 4, 2 if low else 1),
        chosen=Tile(64, 64 if low else 32, 4, 3 if low else 2),
        chosen_grad=Tile(64, 32, 4 if low else 8, 2),
        dense_target=Tile(64, 64 if low else 16, 4, 2 if low else 1),
        dq=Tile(64, 64, 4, 2),
        dk=Tile(64, 64, 4, 2),
        block_bytes=16 << 20, block_queries=512, programs=264,
    )  # fmt: skip
