"""What the GPU kernels of sparse_flash_attention share: a query's heads, its slots, their rows."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu

LOG2_E = math.log2(math.e)


class Sizes(NamedTuple):
    """What kernels are specialised to."""

    B: int
    S: int
    N: int
    C: int
    R: int
    J: int
    scale: float


class Slots(NamedTuple):
    """Some slots of a query: the rows they choose, and whether they choose one."""

    at: Any
    rows_j: jax.Array
    chosen_j: jax.Array

    @classmethod
    def of(cls, indices_ref, number, size: int) -> "Slots":
        """The number-th tile of `size` slots; a last one that is not full is lengthened by -1."""
        at = pl.ds(pl.multiple_of(number * size, size), size)
        inside_j = number * size + jnp.arange(size, dtype=jnp.int32) < indices_ref.shape[0]
        index_j = _gpu.load(indices_ref.at[at], inside_j)
        chosen_j = inside_j & (index_j >= 0)
        return cls(at, jnp.where(chosen_j, index_j, 0), chosen_j)

    def read(self, rows_refs: Sequence[Any]) -> list[jax.Array]:
        """The chosen rows of each reference, zeros for the others."""
        return [_gpu.load_rows(ref, self.rows_j, self.chosen_j) for ref in rows_refs]


def used_slots(indices_BTJ: jax.Array) -> jax.Array:
    """How many slots of a query are to be visited, [B, T]: those behind hold -1."""
    place_J = 1 + jnp.arange(indices_BTJ.shape[2], dtype=jnp.int32)
    return jnp.max(jnp.where(indices_BTJ >= 0, place_J, 0), axis=2, initial=0)


def num_tiles(used_ref, query, size: int):
    """Tiles of slots that a query uses."""
    return lax.div(used_ref[query] + (size - 1), size)


class Heads(NamedTuple):
    """A tile of heads: the first one, how many, and how many there are in all."""

    first: Any
    size: int
    all: int

    @property
    def at(self):
        return pl.ds(jnp.int32(self.first), self.size)  # which, if known, may not pass the end

    def mask(self, other: int | None = None, axis: int = 0) -> jax.Array | None:
        """Which of them exist, None if all do; with `other` beside an axis of that size."""
        if self.all % self.size == 0:
            return None
        inside_n = self.first + jnp.arange(self.size, dtype=jnp.int32) < self.all
        if other is None:
            return inside_n
        shape = (self.size, other) if axis == 0 else (other, self.size)
        return jnp.broadcast_to(jnp.expand_dims(inside_n, 1 - axis), shape)

    def read(self, ref, columns: tuple[Any, int] | None = None) -> jax.Array:
        """Columns of a reference [N, x], first one and how many; 0 for heads that do not exist."""
        start, width = columns or (0, ref.shape[1])
        return _gpu.load(ref.at[self.at, pl.ds(start, width)], self.mask(width))

    def write(self, ref, value: jax.Array, columns: tuple[Any, int] | None = None) -> None:
        """As `read`."""
        start, width = columns or (0, ref.shape[1])
        _gpu.store(ref.at[self.at, pl.ds(start, width)], value, self.mask(width))

    def read_thin(self, ref) -> jax.Array:
        """Of a reference [N]."""
        return _gpu.load(ref.at[self.at], self.mask())

    def write_thin(self, ref, value_n: jax.Array) -> None:
        _gpu.store(ref.at[self.at], value_n, self.mask())

    def read_across(self, ref, at: Any) -> jax.Array:
        """Of a reference [x, N], the places `at`."""
        return _gpu.load(ref.at[at, self.at], self.mask(at.size, axis=1))

    def write_across(self, ref, at: Any, value_xn: jax.Array) -> None:
        _gpu.store(ref.at[at, self.at], value_xn, self.mask(at.size, axis=1))


def head_tile(num_heads: int, limit: int) -> int:
    """Heads of a tile: a power of two, 16 or more, not more than needed."""
    return min(limit, max(16, 1 << (num_heads - 1).bit_length()))


def dots(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """Sum over the parts of a product over channels, a b'."""
    return add(_gpu.dot(x, y, trans_b=True) for x, y in zip(a, b, strict=True))


def add(parts: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


def of_query(x: Any) -> pl.BlockSpec:
    """Of [B, T, ...]: what the program's query has; grids are (tile, query, row)."""
    rest = x.shape[2:]
    return pl.BlockSpec((None, None, *rest), lambda i, t, b: (b, t, *(0,) * len(rest)))


def of_row(x: Any) -> pl.BlockSpec:
    """Of [B, ...]: the program's row of the batch."""
    rest = x.shape[1:]
    return pl.BlockSpec((None, *rest), lambda i, t, b: (b, *(0,) * len(rest)))
