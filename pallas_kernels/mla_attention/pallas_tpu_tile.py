"""What the TPU kernels of mla_attention share: grids, blocks, and the loop over a span of tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _tpu
from pallas_kernels.mla_attention import chosen, spans
from pallas_kernels.mla_attention.tiles import TPU_BYTES, Tile


class Sizes(NamedTuple):
    """What kernels are specialised to."""

    B: int
    N: int
    H: int
    h: int
    num_q: int  # tiles of queries
    num_k: int
    tile: Tile
    scale: float
    causal: bool

    @property
    def T(self) -> int:
        return self.num_q * self.tile.queries

    @property
    def S(self) -> int:
        return self.num_k * self.tile.keys


class Seen(NamedTuple):
    """What hides keys from queries.

    seg_q, seg_k: segment ids [B, T], [B, S]. q_offset: position of the first query. bits: of the
    chosen keys, as `chosen.pack` gives them, or None.
    """

    seg_q: jax.Array
    seg_k: jax.Array
    q_offset: jax.Array
    bits: jax.Array | None


def vmem(*shape: int) -> Any:
    """Sums in float32 that live through the grid."""
    return pltpu.VMEM(shape, jnp.float32)


class Kernel:
    """A grid (row, head, tile, other tile): `by_key` has keys own their tiles, else queries."""

    def __init__(self, sizes: Sizes, *, by_key: bool = False):
        self.sizes, self.by_key = sizes, by_key
        both = (sizes.num_q, sizes.num_k)
        self.num_own, self.num_other = both[::-1] if by_key else both

    def call(
        self, body: Callable, name: str, seen: Seen, given, in_specs, out_shape, out_specs, scratch
    ) -> list[jax.Array]:
        """Runs `body(kernel, tables, *refs)`, tables being spans and documents."""
        sizes = self.sizes
        table = spans.spans(
            *seen[:3],
            sizes.tile[:2],
            sizes.causal,
            by_key=self.by_key,
            never_full=seen.bits is not None,
        )
        rows = [x[:, None] for x in (seen.seg_q, seen.seg_k)]
        row_specs = [self._documents(False), self._documents(True)]
        if seen.bits is not None:
            rows, row_specs = [*rows, seen.bits], [*row_specs, self._bits()]
        num = 1 + len(rows)
        return _tpu.call(
            lambda *refs: body(self, refs[:num], *refs[num:]), name=name,
            grid=(sizes.B, sizes.N, self.num_own, self.num_other),
            in_specs=[*row_specs, *in_specs],
            out_specs=list(out_specs), out_shape=out_shape, parallel=3, num_prefetch=1,
            scratch=scratch, vmem_bytes=TPU_BYTES,
        )(table.reshape(-1), *rows, *given)  # fmt: skip

    def _span(self, table_ref, b, i):
        """Row of the table: first tile, end, and so on."""
        start = (b * self.num_own + i) * spans.NUM
        return [table_ref[start + column] for column in range(spans.NUM)]

    def _place(self, of_keys: bool) -> Callable:
        """Which tile of queries or keys a step has; one that is skipped keeps what is there."""

        def place(b, i, j, table_ref):
            if of_keys == self.by_key:
                return i
            first, end = self._span(table_ref, b, i)[:2]
            return jnp.clip(j, first, jnp.maximum(end - 1, first))

        return place

    def _wide(self, of_keys: bool, width: int) -> pl.BlockSpec:
        place, size = self._place(of_keys), self.sizes.tile.size(of_keys)
        return pl.BlockSpec(
            (None, None, size, width), lambda b, n, i, j, table: (b, n, place(b, i, j, table), 0)
        )

    def of_queries(self, width: int) -> pl.BlockSpec:
        """Of [B, N, T, width]."""
        return self._wide(False, width)

    def of_keys(self, width: int) -> pl.BlockSpec:
        """Of [B, N, S, width]."""
        return self._wide(True, width)

    def thin(self) -> pl.BlockSpec:
        """Of [B, N, 1, T]."""
        place, size = self._place(False), self.sizes.tile.queries
        return pl.BlockSpec(
            (None, None, 1, size), lambda b, n, i, j, table: (b, n, 0, place(b, i, j, table))
        )

    def _documents(self, of_keys: bool) -> pl.BlockSpec:
        """Of [B, 1, X]."""
        place, size = self._place(of_keys), self.sizes.tile.size(of_keys)
        return pl.BlockSpec(
            (None, 1, size), lambda b, n, i, j, table: (b, 0, place(b, i, j, table))
        )

    def _bits(self) -> pl.BlockSpec:
        """Of [B, S / 32, T]."""
        of_q, of_k, tile = self._place(False), self._place(True), self.sizes.tile
        return pl.BlockSpec(
            (None, tile.keys // chosen.BITS, tile.queries),
            lambda b, n, i, j, table: (b, of_k(b, i, j, table), of_q(b, i, j, table)),
        )

    def loop(self, tables, start: Callable, step: Callable, end: Callable) -> None:
        """`start()`, then `step(mask)` at each tile that is met, None where it is full; `end()`."""
        b, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
        first, last, full_first, full_end, q_offset = self._span(tables[0], b, i)
        full = (full_first <= j) & (j < full_end)
        pl.when(j == 0)(start)
        if len(tables) == 3:  # a tile of chosen keys is never full
            pl.when(full)(lambda: step(None))

        @pl.when((first <= j) & (j < last) & ~full)
        def _():
            at_q, at_k = (j, i) if self.by_key else (i, j)
            step(self._visible(tables[1:], at_q, at_k, q_offset))

        pl.when(j == self.num_other - 1)(end)

    def _visible(self, rows, at_q, at_k, q_offset) -> jax.Array:
        """Which pairs [keys, queries] count."""
        (t, s), (seg_q_ref, seg_k_ref) = self.sizes.tile[:2], rows[:2]
        seg_1t = seg_q_ref[...]
        # documents of keys, as a column: what can be turned is a whole tile of 8 rows
        seg_s1 = jnp.broadcast_to(seg_k_ref[...], (8, s)).T[:, :1]
        seen = (seg_s1 == seg_1t) & (seg_1t > 0)
        key = lax.broadcasted_iota(jnp.int32, (s, t), 0)
        if self.sizes.causal:
            query = q_offset + at_q * t + lax.broadcasted_iota(jnp.int32, (s, t), 1)
            seen &= at_k * s + key <= query
        if len(rows) > 2:
            words = jnp.broadcast_to(rows[2][...][:, None], (s // chosen.BITS, chosen.BITS, t))
            bits = lax.shift_right_logical(words.reshape(s, t), key % chosen.BITS)
            seen &= bits & 1 != 0
        return seen
