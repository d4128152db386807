"""What the GPU kernels of mla_attention share: grids, reads of a head's tile, loops over spans."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.mla_attention import chosen, spans
from pallas_kernels.mla_attention.tiles import Tile

LOG2_E = math.log2(math.e)


class Sizes(NamedTuple):
    """What kernels are specialised to."""

    B: int
    T: int
    S: int
    N: int
    H: int
    h: int
    scale: float
    causal: bool


class Seen(NamedTuple):
    """What hides keys from queries.

    seg_q, seg_k: segment ids [B, T], [B, S]. q_offset: position of the first query. indices: the
    chosen keys of each query [B, T, J], or None.
    """

    seg_q: jax.Array
    seg_k: jax.Array
    q_offset: jax.Array
    indices: jax.Array | None


class Run(NamedTuple):
    """A tile of a head: its positions along a row, and their documents."""

    head: Any
    first: Any
    seg_x: jax.Array

    @classmethod
    def of(cls, head, seg_ref, index, size: int) -> "Run":
        first = pl.multiple_of(index * size, size)
        return cls(head, first, _gpu.load(seg_ref.at[pl.ds(first, size)]))

    @property
    def at(self):
        return pl.ds(self.first, self.seg_x.shape[0])

    @property
    def positions_x(self):
        return self.first + jnp.arange(self.seg_x.shape[0], dtype=jnp.int32)

    def read(self, ref, width: int, masked: bool = True) -> list[jax.Array]:
        """The head's columns, in parts of a power of two; padding is 0 where `masked`."""
        mask = (self.seg_x > 0)[:, None] if masked else None
        start = self.head * width
        tiles = []
        for offset, size in parts(width):
            where = None if mask is None else jnp.broadcast_to(mask, (mask.shape[0], size))
            tiles.append(_gpu.load(ref.at[self.at, pl.ds(start + offset, size)], where))
        return tiles

    def read_thin(self, ref, masked: bool = True) -> jax.Array:
        """One number a position; padding is 0 where `masked`."""
        return _gpu.load(ref.at[self.at], self.seg_x > 0 if masked else None)

    def write(self, ref, tiles: list[jax.Array], length: int) -> None:
        """The head's columns of the positions before `length`."""
        inside = (self.positions_x < length)[:, None]
        widths = [tile.shape[1] for tile in tiles]
        start = self.head * sum(widths)
        for tile, (offset, size) in zip(tiles, parts(sum(widths)), strict=True):
            where = jnp.broadcast_to(inside, tile.shape)
            _gpu.store(ref.at[self.at, pl.ds(start + offset, size)], tile, where)


def parts(width: int) -> list[tuple[int, int]]:
    """(start, width) of powers of two, largest first, that make up a width: 192 = 128 + 64."""
    cut, start = [], 0
    for bit in reversed(range(width.bit_length())):
        if width >> bit & 1:
            cut.append((start, 1 << bit))
            start += 1 << bit
    return cut


def dots(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Sum over the parts of a product over channels, a b'."""
    products = (_gpu.dot(x, y, trans_b=True) for x, y in zip(a, b, strict=True))
    return functools.reduce(jnp.add, products)


class Kernel:
    """A grid (tile, head, row), the first the fastest: neighbours read the same keys.

    With `by_key` programs own tiles of keys and go through queries; else the other way round.
    """

    def __init__(self, sizes: Sizes, tile: Tile, *, by_key: bool = False):
        self.sizes, self.tile, self.by_key = sizes, tile, by_key
        self.num_tiles = pl.cdiv(*((sizes.S, tile.keys) if by_key else (sizes.T, tile.queries)))

    def call(
        self, body: Callable, name: str, seen: Seen, wide, thin, out_wide, out_thin=()
    ) -> list[jax.Array]:
        """Runs `body(kernel, tables, *refs)` over `wide`, `thin`, `out_wide` and `out_thin`.

        Wide arrays are [B, X, channels of all heads], of which a program sees its row; thin ones
        [B, N, X], of which it sees its row and head.
        """
        tile = self.tile
        seg_q, seg_k = (
            jnp.pad(seg, ((0, 0), (0, -seg.shape[1] % size)))
            for seg, size in ((seen.seg_q, tile.queries), (seen.seg_k, tile.keys))
        )
        table = spans.spans(
            seg_q, seg_k, seen.q_offset, tile[:2], self.sizes.causal, by_key=self.by_key,
            never_full=seen.indices is not None,
        )  # fmt: skip
        tables: tuple[jax.Array, ...] = (seg_q, seg_k, table)
        if seen.indices is not None:
            tables += (chosen.pack(seen.indices, seg_q.shape[1], seg_k.shape[1]),)
        row = lambda x: pl.BlockSpec((None, *x.shape[1:]), lambda i, n, b: _row(x, b))  # noqa: E731
        own = lambda x: pl.BlockSpec((None, None, x.shape[2]), lambda i, n, b: (b, n, 0))  # noqa: E731
        return _gpu.call(
            lambda *refs: body(self, refs[: len(tables)], *refs[len(tables) :]), name=name,
            grid=(self.num_tiles, self.sizes.N, self.sizes.B),
            in_specs=[*map(row, (*tables, *wide)), *map(own, thin)],
            out_specs=[*map(row, out_wide), *map(own, out_thin)],
            out_shape=[*out_wide, *out_thin], warps=tile.warps, stages=tile.stages,
        )(*tables, *wide, *thin)  # fmt: skip

    def own(self, tables) -> tuple[Run, list[jax.Array]]:
        """This program's tile, and its row of the table of spans. Long spans start first."""
        i, head = pl.program_id(0), pl.program_id(1)
        if not self.by_key:
            i = self.num_tiles - 1 - i
        run = Run.of(head, tables[int(self.by_key)], i, self.tile.size(self.by_key))
        return run, [tables[2][i, column] for column in range(spans.NUM)]

    def loop(self, tables, span, step: Callable, carry: Any) -> Any:
        """carry = step(run, carry, masked) over the tiles that this program's tile meets."""
        head = pl.program_id(1)
        seg_ref, size = tables[int(not self.by_key)], self.tile.size(not self.by_key)
        first, end, full_first, full_end = span[: spans.OFFSET]
        num_full = full_end - full_first

        def whole(index, carry):
            return step(Run.of(head, seg_ref, index, size), carry, False)

        def edge(i, carry):
            index = first + i
            index += jnp.where(index >= full_first, num_full, 0)
            return step(Run.of(head, seg_ref, index, size), carry, True)

        if len(tables) == 3:  # a tile of chosen keys is never full
            carry = lax.fori_loop(full_first, full_end, whole, carry)
        return lax.fori_loop(0, end - first - num_full, edge, carry)

    def visible(self, tables, queries: Run, keys: Run, q_offset, key_axis: int) -> jax.Array:
        """Which pairs count; keys lie along `key_axis`, queries along the other."""
        of_q = lambda x: jnp.expand_dims(x, key_axis)  # noqa: E731
        of_k = lambda x: jnp.expand_dims(x, 1 - key_axis)  # noqa: E731
        seg_q = of_q(queries.seg_x)
        seen = (seg_q == of_k(keys.seg_x)) & (seg_q > 0)
        if self.sizes.causal:
            seen &= of_k(keys.positions_x) <= of_q(queries.positions_x + q_offset)
        if len(tables) > 3:
            seen &= _chosen_bits(tables[3], queries, keys, of_q, of_k) != 0
        return seen


def _chosen_bits(bits_ref, queries: Run, keys: Run, of_q, of_k) -> jax.Array:
    """1 where the key is chosen: each word of a query has 32 neighbours' bits."""
    size = keys.seg_x.shape[0]
    place = of_k(jnp.arange(size, dtype=jnp.int32))
    words = jnp.zeros((), jnp.int32)
    for i in range(size // chosen.BITS):
        word = of_q(bits_ref[lax.div(keys.first, chosen.BITS) + i, queries.at])
        words = jnp.where(place // chosen.BITS == i, word, words)
    return lax.shift_right_logical(words, jnp.broadcast_to(place % chosen.BITS, words.shape)) & 1


def _row(x, b):
    return (b, *(0,) * (len(x.shape) - 1))
