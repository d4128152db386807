"""Ragged all-to-all into a bounded receive buffer: sends exactly the rows there are.

A device sorts its rows by expert, all share their counts, and each turn fills a buffer of
`capacity` rows from the front of what is still to come (see `plan`). Results go back by the
mirrored exchange into the places their rows came from; the gradient is those two exchanges again,
in the other direction.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.partitioning.expert_exchange.collective import (
    Link,
    blank_rows,
    fetch_rows,
    return_rows,
)
from moejax.partitioning.expert_exchange.plan import arrival_plan, num_turns, turn_runs
from moejax.partitioning.expert_exchange.rounds import DISPATCHED, RETURNED, Arrived
from pallas_kernels.permute import PermutePlan, permute, plan_permute, unpermute


class Routing(NamedTuple):
    """This device's rows sorted by expert, and how many every device has for every expert."""

    plan: PermutePlan
    counts_PE: jax.Array


def receive_rows(num_rows: int, ranks: int, receive_factor: float) -> int:
    """Rows of the receive buffer.

    `receive_factor` times an even share (as many as a device sends), a multiple of 8, at most all
    that all devices have.
    """
    share = math.ceil(receive_factor * num_rows)
    return max(min(-(-share // 8) * 8, ranks * num_rows), 1)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """The exchange's stages for one static size; every method runs inside shard_map."""

    ranks: int
    local_experts: int
    capacity: int
    never_overflows: bool  # one turn is enough whatever the routing
    link: Link

    writes_in_place = True

    @classmethod
    def sized(cls, num_rows: int, ranks: int, num_experts: int, receive_factor: float, link: Link):
        """Sizes for `num_rows` assignments on each of `ranks` devices."""
        capacity = receive_rows(num_rows, ranks, receive_factor)
        return cls(ranks, num_experts // ranks, capacity, capacity >= ranks * num_rows, link)

    def route(self, expert_ids_MA: jax.Array) -> Routing:
        plan = plan_permute(expert_ids_MA, self.ranks * self.local_experts)
        counts_PE = checkpoint_name(lax.all_gather(plan.group_sizes, self.link.axis), DISPATCHED)
        return Routing(plan, counts_PE)

    def num_rounds(self, routing: Routing) -> jax.Array:
        return num_turns(routing.counts_PE, self.capacity)

    def sent_rows(self, routing: Routing, num_rounds: jax.Array) -> jax.Array:
        """Rows that leave this device on their way to experts."""
        me = lax.axis_index(self.link.axis)
        by_device_P = routing.plan.group_sizes.reshape(self.ranks, -1).sum(-1)
        return (by_device_P.sum() - by_device_P[me]).astype(jnp.float32)

    def send(self, x_ML: jax.Array, routing: Routing, turn) -> Arrived:
        there, back = self._runs(routing, turn)
        rows_RL = permute(x_ML, routing.plan)
        slots_CL = fetch_rows(rows_RL, there, back, self.link, self.capacity)
        mine_Pe = lax.dynamic_slice_in_dim(
            routing.counts_PE,
            lax.axis_index(self.link.axis) * self.local_experts,
            self.local_experts,
            axis=1,
        )
        return Arrived(
            checkpoint_name(slots_CL, DISPATCHED), arrival_plan(mine_Pe, turn, self.capacity)
        )

    def collect(self, out_CL: jax.Array, weights_MA, routing: Routing, turn, so_far=None):
        """Results by sorted place [R, L]; places of other turns are as in `so_far`."""
        if so_far is None:
            so_far = blank_rows(weights_MA.size, out_CL)
        there, back = self._runs(routing, turn)
        return return_rows(out_CL, so_far, there, back, self.link)

    def finish(self, rows_RL: jax.Array, weights_MA: jax.Array, routing: Routing) -> jax.Array:
        return unpermute(checkpoint_name(rows_RL, RETURNED), weights_MA, routing.plan)

    def _runs(self, routing: Routing, turn):
        return turn_runs(routing.counts_PE, lax.axis_index(self.link.axis), turn, self.capacity)
