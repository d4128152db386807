"""Ragged all-to-all into a bounded receive buffer: sends exactly the rows there are.

A device sorts its rows by expert, all share their counts, and each turn fills a buffer of
`capacity` rows from the front of what is still to come (see `plan`). Results go back by the
mirrored exchange into the places their rows came from; the gradient is those two exchanges again,
in the other direction.

Where a device may have many more rows to send than an even routing gives it (the second hop of
level "host"), it also sorts no more than `window` of them into a buffer at a time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

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
from moejax.partitioning.expert_exchange.plan import (
    arrival_plan,
    turn_runs,
    turns_of,
    weights_inside,
    window_plan,
    window_sizes,
)
from moejax.partitioning.expert_exchange.rounds import DISPATCHED, RETURNED, Arrived, Need
from pallas_kernels.permute import PermutePlan, permute, plan_permute, unpermute


class Routing(NamedTuple):
    """This device's rows sorted by expert, and how many every device has for every expert."""

    plan: PermutePlan
    counts_WPE: jax.Array  # by window of the sorted rows


def receive_rows(share: float, most: int, receive_factor: float) -> int:
    """Rows of the receive buffer.

    `receive_factor` times an even share, a multiple of 8, at most all that can come.
    """
    rows = math.ceil(receive_factor * share)
    return max(min(-(-rows // 8) * 8, most), 1)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """The exchange's stages for one static size; every method runs inside shard_map."""

    ranks: int
    local_experts: int
    capacity: int
    window: int
    num_windows: int
    link: Link
    never_overflows: bool  # one turn is enough whatever the routing
    wide_sums: bool

    told_bytes = 0

    @classmethod
    def sized(cls, need: Need, factor: float, link: Link):
        """A buffer of `factor` times an even share."""
        most = need.ranks * need.most_to_one
        capacity = receive_rows(need.share, most, factor)
        window = need.rows
        if need.bounded:
            window = receive_rows(need.share, need.rows, factor)
        num_windows = max(-(-need.rows // window), 1) if window else 1
        fits = capacity >= most and num_windows == 1
        return cls(
            need.ranks, need.local_experts, capacity, window, num_windows, link, fits,
            not need.bounded,
        )  # fmt: skip

    @property
    def writes_in_place(self) -> bool:
        return self.num_windows == 1

    def route(self, expert_ids_MA: jax.Array) -> Routing:
        plan = plan_permute(expert_ids_MA, self.ranks * self.local_experts)
        sizes_WE = window_sizes(plan.group_sizes, self.window, self.num_windows)
        counts_PWE = checkpoint_name(self.link.gather(sizes_WE), DISPATCHED)
        return Routing(plan, counts_PWE.swapaxes(0, 1))

    def num_rounds(self, routing: Routing) -> jax.Array:
        return jnp.maximum(jnp.sum(self._turns(routing), dtype=jnp.int32), 1)

    def sent_rows(self, routing: Routing, num_rounds: jax.Array) -> jax.Array:
        """Rows for the experts of every device [P]."""
        by_device_P = routing.plan.group_sizes.reshape(self.ranks, -1).sum(-1)
        return by_device_P.astype(jnp.float32)

    def size_bytes(self) -> int:
        """Bytes of the counts that go to every other device."""
        return 4 * self.num_windows * self.ranks * self.local_experts

    def send(self, x: Any, routing: Routing, turn) -> Arrived:
        counts_PE, plan, turn = self._step(routing, turn)
        there, back = turn_runs(counts_PE, self.link.me(), turn, self.capacity)

        def moved(x_ML):
            rows_RL = permute(x_ML, plan)
            slots_CL = fetch_rows(rows_RL, there, back, self.link, self.capacity)
            return checkpoint_name(slots_CL, DISPATCHED)

        first = self.link.me() * self.local_experts
        mine_Pe = lax.dynamic_slice_in_dim(counts_PE, first, self.local_experts, axis=1)
        return Arrived(jax.tree.map(moved, x), arrival_plan(mine_Pe, turn, self.capacity))

    def start(self, like_ML: jax.Array, weights_MA: jax.Array) -> jax.Array:
        """What `collect` writes to before any turn."""
        if self.writes_in_place:
            return blank_rows(weights_MA.size, like_ML)
        return jnp.zeros(like_ML.shape, like_ML.dtype)

    def collect(self, out_CL: jax.Array, weights_MA, routing: Routing, turn, so_far=None):
        """Results by sorted place [R, L]; places of other turns are as in `so_far`.

        With several windows: the weighted sum [M, L], summed in float32, added to `so_far`.
        """
        counts_PE, plan, turn = self._step(routing, turn)
        there, back = turn_runs(counts_PE, self.link.me(), turn, self.capacity)
        if self.writes_in_place:
            if so_far is None:
                so_far = self.start(out_CL, weights_MA)
            return return_rows(out_CL, so_far, there, back, self.link)
        # Zeros, not blank rows: the turns of a window each bring some of its rows, all are summed.
        zeros_SL = jnp.zeros((self.window, out_CL.shape[1]), out_CL.dtype)
        rows_SL = return_rows(out_CL, zeros_SL, there, back, self.link)
        rows_SL = checkpoint_name(rows_SL, RETURNED).astype(
            jnp.promote_types(out_CL.dtype, jnp.float32)
        )
        sum_ML = unpermute(rows_SL, weights_inside(plan, weights_MA), plan).astype(out_CL.dtype)
        return sum_ML if so_far is None else so_far + sum_ML

    def finish(self, rows_RL: jax.Array, weights_MA: jax.Array, routing: Routing) -> jax.Array:
        if not self.writes_in_place:
            return rows_RL
        return unpermute(checkpoint_name(rows_RL, RETURNED), weights_MA, routing.plan)

    def _turns(self, routing: Routing) -> jax.Array:
        """Turns that every window takes [W]; those behind the last row take none."""
        return jax.vmap(lambda counts_PE: turns_of(counts_PE, self.capacity))(routing.counts_WPE)

    def _step(self, routing: Routing, turn):
        """Counts and sort of the window that is on in a turn, and the turn within it."""
        if self.num_windows == 1:
            return routing.counts_WPE[0], routing.plan, turn
        turns_W = self._turns(routing)
        ends_W = jnp.cumsum(turns_W, dtype=jnp.int32)
        which = jnp.minimum(jnp.sum(turn >= ends_W, dtype=jnp.int32), self.num_windows - 1)
        plan = window_plan(routing.plan, which, self.window)
        return routing.counts_WPE[which], plan, turn - (ends_W - turns_W)[which]
