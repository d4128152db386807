"""The exact top-J of rows of scores on a GPU, lowest index first among equals.

A program keeps part of a row in its registers as integers that order like the scores, and halves
the interval that holds the J-th largest until the count above a border is J, or the interval is one
number: then its keys tie, and the first of them fill up. What the parts of a row keep is
selected from once more, which loses nothing: a part keeps as many as the row may.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.lightning_indexer.pallas_gpu_scores import power_of_two
from pallas_kernels.lightning_indexer.tiles import Tiles

_LARGEST = 2**31 - 1
# The key of -inf: what is not visible.
_NOT_VISIBLE = -0x7F800001
# Scores whose places are counted at once.
_PIECE = 2048


def can_select(num_keys: int, top_k: int, tiles: Tiles) -> bool:
    """Whether `select` takes this; what the parts of a row keep must be less than the row."""
    return num_keys <= tiles.select or 2 * power_of_two(top_k) <= tiles.select


def select(scores_RS: jax.Array, top_k: int, tiles: Tiles) -> tuple[jax.Array, jax.Array]:
    """Positions [R, J] of the largest scores in rising order, -1 behind them, and their scores.

    Scores of -inf are not taken, those of a row that count else are all numbers; J is at most S.
    """
    positions = None
    while True:
        part = min(tiles.select, power_of_two(scores_RS.shape[1]))
        num_parts = pl.cdiv(scores_RS.shape[1], part)
        scores_RS = _lengthened(scores_RS, num_parts * part, -jnp.inf)
        if positions is not None:
            positions = _lengthened(positions, num_parts * part, -1)
        positions, scores_RS = _select_parts(scores_RS, positions, part, min(top_k, part), tiles)
        if num_parts == 1:
            return positions[:, :top_k], scores_RS[:, :top_k]


def _lengthened(x_RS, length, fill):
    extra = length - x_RS.shape[1]
    return jnp.pad(x_RS, ((0, 0), (0, extra)), constant_values=fill) if extra else x_RS


def _select_parts(scores_RS, positions_RS, part, keep, tiles):
    rows, width = scores_RS.shape
    cut = _Cut(width, part, keep, power_of_two(keep))
    given = [scores_RS.reshape(-1)]
    if positions_RS is not None:
        given.append(positions_RS.reshape(-1))
    num_out = rows * cut.num_parts * cut.slots
    out = [jax.ShapeDtypeStruct((num_out,), dtype) for dtype in (jnp.int32, jnp.float32)]
    whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,))  # noqa: E731
    # as many threads as leave each 64 scores, but enough for counting the places of a piece
    warps = max(min(4, pl.cdiv(part, 64)), part * tiles.select_warps // tiles.select)
    positions, scores = _gpu.call(
        functools.partial(_body, cut), name="select_keys", grid=(rows, cut.num_parts),
        in_specs=[whole(a) for a in given], out_specs=[whole(a) for a in out], out_shape=out,
        warps=warps, stages=1,
    )(*given)  # fmt: skip
    return positions.reshape(rows, -1), scores.reshape(rows, -1)


class _Cut(NamedTuple):
    """A row of `width` in parts, each of which fills `keep` of its `slots`."""

    width: int
    part: int
    keep: int
    slots: int

    @property
    def num_parts(self) -> int:
        return self.width // self.part


def _body(cut, *refs):
    scores_ref, *positions_ref, out_ref, out_scores_ref = refs
    number = pl.program_id(0) * cut.num_parts + pl.program_id(1)
    here, there, first = number * cut.part, number * cut.slots, pl.program_id(1) * cut.part
    low, high, wanted = _borders(_keys(_gpu.load(scores_ref.at[pl.ds(here, cut.part)])), cut.keep)
    size = min(cut.part, _PIECE)

    def piece(i, state):
        # read once more, for counting places takes the registers that the search had
        scores_s = _gpu.load(scores_ref.at[pl.ds(here + i * size, size)])
        key_s = _keys(scores_s)
        chosen_s, rank_s, state = _ranks(key_s >= high, key_s == low, wanted, state)
        if positions_ref:
            places = pl.ds(here + i * size, size)
            position_s = _gpu.load(positions_ref[0].at[places], chosen_s)
        else:
            position_s = first + i * size + jnp.arange(size, dtype=jnp.int32)
        _gpu.store_at(out_ref, there + rank_s, position_s, chosen_s)
        _gpu.store_at(out_scores_ref, there + rank_s, scores_s, chosen_s)
        return state

    state = lax.fori_loop(0, cut.part // size, piece, (jnp.int32(0), jnp.int32(0)))
    # the rest of the slots has nothing
    slot_j = jnp.arange(cut.slots, dtype=jnp.int32)
    rest_j = slot_j >= state[0] + jnp.minimum(state[1], wanted)
    nothing_j = jnp.full(slot_j.shape, -1, jnp.int32)
    _gpu.store_at(out_ref, there + slot_j, nothing_j, rest_j)
    _gpu.store_at(out_scores_ref, there + slot_j, nothing_j.astype(jnp.float32) * jnp.inf, rest_j)


def _keys(scores_s):
    """Integers that order like the scores."""
    bits_s = lax.bitcast_convert_type(scores_s, jnp.int32)
    return jnp.where(bits_s < 0, bits_s ^ _LARGEST, bits_s)


def _borders(key_s, keep):
    """(low, high, wanted): chosen are keys from `high` on, and `wanted` of those equal to `low`."""
    count = lambda where_s: jnp.sum(where_s.astype(jnp.int32))  # noqa: E731
    visible_s = key_s > _NOT_VISIBLE

    def unsure(state):
        low, high, num_low, _ = state
        return (num_low > keep) & (low + 1 < high)

    def halve(state):
        low, high, num_low, num_high = state
        middle = (low & high) + ((low ^ high) >> 1)  # without overflow, and below `high`
        num = count(key_s >= middle)
        enough = num >= keep
        return (
            jnp.where(enough, middle, low), jnp.where(enough, high, middle),
            jnp.where(enough, num, num_low), jnp.where(enough, num_high, num),
        )  # fmt: skip

    # at least `keep` keys reach `low`, or all that are visible; fewer reach `high`
    low = jnp.min(jnp.where(visible_s, key_s, _LARGEST))
    high = jnp.max(key_s) + 1
    state = low, high, count(visible_s), jnp.int32(0)
    low, high, num_low, num_high = lax.while_loop(unsure, halve, state)
    exact = num_low <= keep
    return low, jnp.where(exact, low, high), jnp.where(exact, 0, keep - num_high)


def _ranks(above_s, ties_s, wanted, before):
    """Which keys are chosen, how many chosen ones come before each, and counts with this piece.

    `before` counts those above and those that tie in the pieces before.
    """
    above_s, ties_s = above_s.astype(jnp.int32), ties_s.astype(jnp.int32)
    # both counts in one pass: a piece is shorter than 2^15
    both_s = jnp.cumsum(above_s + (ties_s << 16))
    num_above_s, num_ties_s = before[0] + (both_s & 0xFFFF), before[1] + (both_s >> 16)
    chosen_s = (above_s > 0) | ((ties_s > 0) & (num_ties_s <= wanted))
    rank_s = num_above_s + jnp.minimum(num_ties_s, wanted) - 1
    return chosen_s, rank_s, (before[0] + jnp.sum(above_s), before[1] + jnp.sum(ties_s))
