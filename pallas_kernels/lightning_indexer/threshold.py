"""The largest scores of each row by rising position, exactly, without a sort: for CPUs.

The J-th largest score is found by halving an interval of the integers that order like floats; what
is at or above it becomes one bit a key, and the set bits' places are read out of the words.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import split

_BITS = 32
# Bytes of scores that are gone through again and again: they should stay in a core's cache. On two
# cores 128 rows of 32 K take 34 to 39 ms by 1 to 4 MiB, 57 by 512 KiB, and 94 all at once.
_GROUP_BYTES = 2 << 20


def select(scores: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Indices and scores [.., J], rising, of the J largest float32 scores [.., S], J at most S.

    Equal scores: the lower index. -inf is never chosen: such slots are last, -1 and -inf. The same
    keys as of a stable sort, for any scores but NaN and -0.0, which `ranked` takes away.
    """
    rows_RS = scores.reshape(-1, scores.shape[-1])
    R, S = rows_RS.shape
    num_groups, size = split(R, max(1, _GROUP_BYTES // (4 * S)))
    rows_RS = jnp.pad(rows_RS, ((0, num_groups * size - R), (0, 0)), constant_values=-jnp.inf)
    groups = rows_RS.reshape(num_groups, size, S)
    find = lambda rows_rS: _places(_packed(_chosen(rows_rS, top_k)), top_k)  # noqa: E731
    indices_RJ = lax.map(find, groups).reshape(-1, top_k)[:R]
    values_RJ = jnp.take_along_axis(rows_RS[:R], jnp.maximum(indices_RJ, 0), axis=1)
    values_RJ = jnp.where(indices_RJ < 0, -jnp.inf, values_RJ)
    shape = (*scores.shape[:-1], top_k)
    return indices_RJ.reshape(shape), values_RJ.reshape(shape)


def _chosen(rows_RS: jax.Array, top_k: int) -> jax.Array:
    """bool [R, S]: the keys that are chosen."""
    keys_RS = _ordered(rows_RS)
    there_RS = rows_RS > -jnp.inf
    wanted_R = jnp.minimum(jnp.sum(there_RS, axis=1, dtype=jnp.int32), top_k)
    limits = jnp.iinfo(jnp.int32)
    low_R = jnp.min(jnp.where(there_RS, keys_RS, limits.max), axis=1)
    high_R = jnp.max(keys_RS, axis=1)

    def halve(carry):
        low_R, high_R, _ = carry
        # the mean of both, rounded up, without overflow
        middle_R = (low_R >> 1) + (high_R >> 1) + ((low_R | high_R) & 1)
        count_R = jnp.sum(keys_RS >= middle_R[:, None], axis=1, dtype=jnp.int32)
        enough_R = count_R >= wanted_R
        low_R = jnp.where(enough_R, middle_R, low_R)
        high_R = jnp.where(enough_R, high_R, middle_R - 1)
        high_R = jnp.where(count_R == wanted_R, middle_R, high_R)
        return low_R, high_R, jnp.any(low_R < high_R)

    # at least `wanted` keys are at or above `low`; fewer are above `high`, or just as many at `low`
    low_R, _, _ = lax.while_loop(lambda c: c[2], halve, (low_R, high_R, jnp.any(low_R < high_R)))
    low_R = jnp.where(wanted_R == 0, limits.max, low_R)
    least_RS = keys_RS >= low_R[:, None]
    count_R = jnp.sum(least_RS, axis=1, dtype=jnp.int32)

    def first_of_ties():
        above_RS = keys_RS > low_R[:, None]
        room_R = wanted_R - jnp.sum(above_RS, axis=1, dtype=jnp.int32)
        tied_RS = least_RS & ~above_RS
        rank_RS = jnp.cumsum(tied_RS, axis=1, dtype=jnp.int32)
        return above_RS | (tied_RS & (rank_RS <= room_R[:, None]))

    return lax.cond(jnp.any(count_R > wanted_R), first_of_ties, lambda: least_RS)


def _ordered(x: jax.Array) -> jax.Array:
    """int32 that order like the float32 `x`."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _packed(mask_RS: jax.Array) -> jax.Array:
    """uint32 [R, W]: key s is bit s % 32 of word s / 32."""
    R, S = mask_RS.shape
    mask_RS = jnp.pad(mask_RS, ((0, 0), (0, -S % _BITS)))
    mask_RWb = mask_RS.reshape(R, -1, _BITS)
    return jnp.sum(mask_RWb.astype(jnp.uint32) << jnp.arange(_BITS, dtype=jnp.uint32), axis=2)


def _places(words_RW: jax.Array, top_k: int) -> jax.Array:
    """int32 [R, J]: places of the set bits, at most J, by rising place; then -1."""
    R, W = words_RW.shape
    counts_RW = lax.population_count(words_RW).astype(jnp.int32)
    ends_RW = jnp.cumsum(counts_RW, axis=1)
    starts_RW = ends_RW - counts_RW
    # A word marks the slot where its keys begin; the last mark so far is a slot's word.
    slots_RW = jnp.where(counts_RW > 0, starts_RW, top_k)
    mark = lambda slots_W: (  # noqa: E731
        jnp.zeros(top_k, jnp.int32).at[slots_W].max(jnp.arange(W, dtype=jnp.int32), mode="drop")
    )
    word_RJ = lax.cummax(jax.vmap(mark)(slots_RW), axis=1)
    left_RJ = jnp.take_along_axis(words_RW, word_RJ, axis=1)
    slot_J = jnp.arange(top_k, dtype=jnp.int32)
    rank_RJ = slot_J - jnp.take_along_axis(starts_RW, word_RJ, axis=1)
    place_RJ = word_RJ * _BITS
    width = _BITS // 2
    while width:  # the half that holds the bit of this rank
        lower_RJ = left_RJ & jnp.uint32((1 << width) - 1)
        below_RJ = lax.population_count(lower_RJ).astype(jnp.int32)
        upper_RJ = rank_RJ >= below_RJ
        left_RJ = jnp.where(upper_RJ, left_RJ >> width, lower_RJ)
        rank_RJ = jnp.where(upper_RJ, rank_RJ - below_RJ, rank_RJ)
        place_RJ = jnp.where(upper_RJ, place_RJ + width, place_RJ)
        width //= 2
    return jnp.where(slot_J < ends_RW[:, -1:], place_RJ, -1)
