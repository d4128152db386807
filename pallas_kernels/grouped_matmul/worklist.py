"""Which tile of rows belongs to which group: lists that the kernels' programs go through."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Bounds(NamedTuple):
    """First row of every group and the one past its last, int32 [E] each."""

    first: jax.Array
    end: jax.Array


def bounds_of(group_sizes_E: jax.Array) -> Bounds:
    """Bounds of groups that lie one after the other."""
    sizes_E = group_sizes_E.astype(jnp.int32)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    return Bounds(ends_E - sizes_E, ends_E)


def pieces_of(num_rows: int, total: jax.Array, length: int) -> Bounds:
    """Bounds of runs of `length` rows that together hold the first `total` rows."""
    first = jnp.arange(-(-num_rows // length), dtype=jnp.int32) * length
    return Bounds(jnp.minimum(first, total), jnp.minimum(first + length, total))


def with_tail(bounds: Bounds, num_rows: int) -> Bounds:
    """Behind the groups a last one, number E, of the rows that belong to none."""
    last = jnp.full((1,), num_rows, jnp.int32)
    return Bounds(
        jnp.concatenate([bounds.first, bounds.end[-1:]]), jnp.concatenate([bounds.end, last])
    )


def tiles(bounds: Bounds, num_rows: int, tile_rows: int, multiple: int = 1) -> jax.Array:
    """Every row of every group in one tile of its group; a tile begins where its group does.

    Args:
      bounds: of E groups (with or without `with_tail`), one after the other.
      num_rows: no group ends behind it.
      tile_rows: rows of a tile at most.
      multiple: the length is rounded up to one of it.
    Returns:
      int32 [3, num_rows // tile_rows + E, rounded]: group, first row, and the row past the last.
      Items that no tile needs have no rows: their first and last are `num_rows`.
    """
    num_groups = bounds.first.shape[0]
    length = _up(num_rows // tile_rows + num_groups, multiple)
    count_E = -(-(bounds.end - bounds.first) // tile_rows)
    group_L, at_L, used_L = _placed(count_E, length)
    first_L = bounds.first[group_L] + at_L * tile_rows
    end_L = jnp.minimum(first_L + tile_rows, bounds.end[group_L])
    return jnp.stack(
        [group_L, jnp.where(used_L, first_L, num_rows), jnp.where(used_L, end_L, num_rows)]
    )


def visits(bounds: Bounds, num_rows: int, tile_rows: int, *, empty_too: bool = False) -> jax.Array:
    """Every aligned tile of rows once for each group that has rows in it, in the rows' order.

    Args:
      bounds: of E groups, one after the other.
      num_rows: a multiple of `tile_rows`, and no group ends behind it.
      tile_rows: rows of a tile.
      empty_too: a group without rows visits a tile, too.
    Returns:
      int32 [4, num_rows // tile_rows + E]: group, tile, first row of the group in this tile, and
      the row past its last. Items that nothing needs repeat the last tile and group, with no rows.
    """
    num_groups = bounds.first.shape[0]
    first_tile_E = bounds.first // tile_rows
    behind_E = -(-bounds.end // tile_rows)
    count_E = jnp.where(bounds.end > bounds.first, behind_E - first_tile_E, int(empty_too))
    group_L, at_L, used_L = _placed(count_E, num_rows // tile_rows + num_groups)
    tile_L = jnp.minimum(first_tile_E[group_L] + at_L, num_rows // tile_rows - 1)
    first_L = jnp.maximum(bounds.first[group_L], tile_L * tile_rows)
    end_L = jnp.minimum(bounds.end[group_L], (tile_L + 1) * tile_rows)
    return jnp.stack([group_L, tile_L, first_L, jnp.where(used_L, end_L, first_L)])


def _placed(count_E: jax.Array, length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each item its group, its place among the group's items, and whether it is one."""
    behind_E = jnp.cumsum(count_E, dtype=jnp.int32)
    item_L = jnp.arange(length, dtype=jnp.int32)
    used_L = item_L < behind_E[-1]
    # an item that is none belongs to the last group with rows: no other weight is asked for
    item_L = jnp.minimum(item_L, jnp.maximum(behind_E[-1] - 1, 0))
    group_L = jnp.sum(behind_E[:, None] <= item_L, axis=0, dtype=jnp.int32)
    group_L = jnp.minimum(group_L, count_E.shape[0] - 1)
    return group_L, item_L - (behind_E - count_E)[group_L], used_L


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
