"""Rows sorted for the experts of one device, no more than a window of them at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moejax.partitioning.expert_exchange.local import ExchangeStats
from moejax.partitioning.expert_exchange.plan import weights_inside, window_plan
from moejax.partitioning.expert_exchange.ragged import receive_rows
from moejax.partitioning.expert_exchange.rounds import Arrived
from pallas_kernels.permute import PermutePlan, permute, plan_permute, unpermute


@dataclasses.dataclass(frozen=True)
class Windows:
    """An exchange that leaves no device: a token becomes one row for each of its local experts.

    How many that will be only the routing tells, so `window` rows are made in a round.
    """

    num_experts: int
    window: int
    never_overflows: bool  # one round is enough whatever the routing

    writes_in_place = False
    wide_sums = False
    link = None

    @classmethod
    def sized(cls, num_experts: int, rows: int, share: float, factor: float):
        """For `rows` assignments at most, of which an even routing has `share`."""
        window = receive_rows(share, max(rows, 1), factor)
        return cls(num_experts, window, window >= rows)

    def route(self, expert_ids_MA: jax.Array) -> PermutePlan:
        return plan_permute(expert_ids_MA, self.num_experts)

    def num_rounds(self, routing: PermutePlan) -> jax.Array:
        rows = jnp.sum(routing.group_sizes, dtype=jnp.int32)
        return jnp.maximum(-(-rows // self.window), 1)

    def send(self, x_ML: jax.Array, routing: PermutePlan, turn) -> Arrived:
        plan = window_plan(routing, turn, self.window)
        return Arrived(permute(x_ML, plan), plan)

    def start(self, like_ML: jax.Array, weights_MA: jax.Array) -> jax.Array:
        """What `collect` adds to before any round."""
        return jnp.zeros(like_ML.shape, like_ML.dtype)

    def collect(self, out_SL: jax.Array, weights_MA, routing: PermutePlan, turn, so_far=None):
        """Weighted sum of the window's rows [M, L], summed in float32, added to `so_far`."""
        plan = window_plan(routing, turn, self.window)
        wide_SL = out_SL.astype(jnp.promote_types(out_SL.dtype, jnp.float32))
        sum_ML = unpermute(wide_SL, weights_inside(plan, weights_MA), plan).astype(out_SL.dtype)
        return sum_ML if so_far is None else so_far + sum_ML

    def finish(self, sum_ML: jax.Array, weights_MA, routing: PermutePlan) -> jax.Array:
        return sum_ML


def sorted_experts(expert_fn, weights: Any, arrived: Arrived, in_loop: bool):
    """`serve` of rows that are sorted by expert already."""
    out_SL = expert_fn(weights, arrived.rows, arrived.plan.group_sizes)
    return out_SL, ExchangeStats.nothing_sent()
