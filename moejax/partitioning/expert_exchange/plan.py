"""Sizes and offsets of a ragged exchange, computed by every device from the same table of counts.

The rows for one device form a stream: those of sender 0 first, each sender's sorted by expert. Turn
t takes rows [t C, (t + 1) C) of every stream, so a receive buffer of C rows serves any routing and
a turn leaves no gap in it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.permute import PermutePlan


class Runs(NamedTuple):
    """One run of rows for each device, as `lax.ragged_all_to_all` takes them (all int32 [P])."""

    input_offsets: jax.Array  # first row of the run in what is sent
    send_sizes: jax.Array
    output_offsets: jax.Array  # where the run starts at its receiver
    recv_sizes: jax.Array


def streams(counts_PE: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each sender (first dim) has for each device (second dim).

    Args:
      counts_PE: int32, rows of every sender for every expert; experts lie on devices in runs.
    Returns:
      Rows [P, P], where they start in the device's stream, where among the sender's sorted rows.
    """
    ranks = counts_PE.shape[0]
    rows_PP = counts_PE.reshape(ranks, ranks, -1).sum(-1, dtype=jnp.int32)
    return rows_PP, _before(rows_PP, 0), _before(rows_PP, 1)


def turns_of(counts_PE: jax.Array, capacity: int) -> jax.Array:
    """Turns until the longest stream is through; 0 where no row is to go anywhere."""
    rows_PP, _, _ = streams(counts_PE)
    return -(-jnp.max(jnp.sum(rows_PP, 0, dtype=jnp.int32)) // capacity)


def turn_runs(counts_PE: jax.Array, me, turn, capacity: int) -> tuple[Runs, Runs]:
    """How device `me` sends its rows in a turn, and how it sends results back.

    Each is the mirror of the other: what one writes, the other reads.
    """
    rows_PP, stream_PP, sorted_PP = streams(counts_PE)
    first_PP = jnp.clip(turn * capacity - stream_PP, 0, rows_PP)
    sizes_PP = jnp.clip((turn + 1) * capacity - stream_PP, 0, rows_PP) - first_PP
    # An empty run may lie outside the turn; its offset is of no account but stays in the buffer.
    slot_PP = jnp.clip(stream_PP + first_PP - turn * capacity, 0, capacity)
    row_PP = sorted_PP + first_PP
    there = Runs(row_PP[me], sizes_PP[me], slot_PP[me], sizes_PP[:, me])
    back = Runs(slot_PP[:, me], sizes_PP[:, me], row_PP[:, me], sizes_PP[me])
    return there, back


def arrival_plan(counts_Pe: jax.Array, turn, capacity: int) -> PermutePlan:
    """Sort by expert of the rows that a turn brings to the device whose experts are counted.

    They arrive by sender and then by expert, so both orders are runs: no row is looked at.

    Args:
      counts_Pe: int32, rows of every sender for every expert of this device.
    """
    start_Pe = _before(counts_Pe.reshape(-1), 0).reshape(counts_Pe.shape) - turn * capacity
    slot_Pe = jnp.clip(start_Pe, 0, capacity)
    sizes_Pe = jnp.clip(start_Pe + counts_Pe, 0, capacity) - slot_Pe
    place_eP = _before(sizes_Pe.T.reshape(-1), 0).reshape(sizes_Pe.T.shape)
    slots, places = slot_Pe.reshape(-1), place_eP.T.reshape(-1)
    positions_C = _follow(slots, sizes_Pe.reshape(-1), places, capacity)
    order_C = _follow(place_eP.reshape(-1), sizes_Pe.T.reshape(-1), slot_Pe.T.reshape(-1), capacity)
    return PermutePlan(order_C, positions_C[:, None], sizes_Pe.sum(0, dtype=jnp.int32))


def window_sizes(sizes_E: jax.Array, rows: int, num_windows: int) -> jax.Array:
    """Rows of every expert in each run of `rows` sorted rows: int32 [W, E]."""
    first_W1 = jnp.arange(num_windows, dtype=jnp.int32)[:, None] * rows
    start_WE = _before(sizes_E, 0) - first_W1
    return jnp.clip(start_WE + sizes_E, 0, rows) - jnp.clip(start_WE, 0, rows)


def window_plan(plan: PermutePlan, which, rows: int) -> PermutePlan:
    """The sort cut to its rows ``which * rows ...``.

    Assignments outside have position `rows`, one past the last.
    """
    num_rows = plan.order.shape[0]
    if rows >= num_rows:
        return plan
    first = which * rows
    padded = jnp.pad(plan.order, (0, -num_rows % rows))
    order_S = lax.dynamic_slice_in_dim(padded, first, rows)
    positions_MA = plan.positions - first
    inside = (positions_MA >= 0) & (positions_MA < rows)
    start_E = _before(plan.group_sizes, 0) - first
    sizes_E = jnp.clip(start_E + plan.group_sizes, 0, rows) - jnp.clip(start_E, 0, rows)
    return PermutePlan(order_S, jnp.where(inside, positions_MA, rows), sizes_E)


def weights_inside(plan: PermutePlan, weights_MA: jax.Array) -> jax.Array:
    """Combine weights, 0 (and without gradient) for assignments outside the window."""
    return jnp.where(plan.positions < jnp.sum(plan.group_sizes), weights_MA, 0)


def _before(x: jax.Array, dim: int) -> jax.Array:
    """Sum of the entries before each one."""
    return jnp.cumsum(x, dim, dtype=jnp.int32) - x


def _follow(starts_G: jax.Array, sizes_G: jax.Array, targets_G: jax.Array, num_rows: int):
    """Target of every row, where runs that follow each other from row 0 are moved as a whole.

    Rows behind the last run stay.
    """
    ended_C = jnp.zeros(num_rows + 1, jnp.int32).at[starts_G + sizes_G].add(1)
    run_C = jnp.cumsum(ended_C, dtype=jnp.int32)[:num_rows]
    shift_G = jnp.concatenate([targets_G - starts_G, jnp.zeros(1, jnp.int32)])
    return jnp.arange(num_rows, dtype=jnp.int32) + shift_G[run_C]
