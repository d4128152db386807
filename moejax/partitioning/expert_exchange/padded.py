"""All-to-all with fixed buckets: runs on every platform and loses no token.

Each device keeps a bucket of `bucket` rows for every other device of the ``expert`` axis. One round
fills the buckets, sends them, runs the experts on what arrived, sends the results back and adds
them up. The first round takes nearly everything; where a hot expert leaves rows behind, further
rounds follow until none is left (see `rounds`). So memory is bounded by the buffer and not by the
worst routing, and the answer never depends on the routing's balance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from moejax.partitioning.expert_exchange.collective import Link
from moejax.partitioning.expert_exchange.rounds import DISPATCHED, RETURNED, Arrived, Need
from pallas_kernels.permute import plan_permute


class Routing(NamedTuple):
    """Where every assignment stands once they are sorted by expert (all int32)."""

    order_R: jax.Array  # assignment at each sorted place
    place_MA: jax.Array  # sorted place of each assignment
    expert_MA: jax.Array  # its expert; num_experts = none
    counts_P: jax.Array  # rows for each device
    starts_P: jax.Array  # first sorted place of each device's rows


def bucket_rows(most: int, share: float, buffer_factor: float) -> int:
    """Rows of one bucket.

    `buffer_factor` times an even share, a multiple of 8, at most as many as there can be.
    """
    rows = math.ceil(buffer_factor * share)
    return min(-(-rows // 8) * 8, most)


@dataclasses.dataclass(frozen=True)
class Padded:
    """The exchange's stages for one static size; every method runs inside shard_map."""

    ranks: int
    local_experts: int
    bucket: int
    never_overflows: bool  # one round is enough whatever the routing
    link: Link
    wide_sums: bool

    writes_in_place = False
    told_bytes = 4  # the expert's number that goes with every row

    @classmethod
    def sized(cls, need: Need, factor: float, link: Link):
        """Buckets of `factor` times an even share."""
        bucket = bucket_rows(need.most_to_one, need.share / need.ranks, factor)
        fits = bucket >= need.most_to_one
        return cls(need.ranks, need.local_experts, bucket, fits, link, not need.bounded)

    def route(self, expert_ids_MA: jax.Array) -> Routing:
        plan = plan_permute(expert_ids_MA, self.ranks * self.local_experts)
        counts_P = plan.group_sizes.reshape(self.ranks, self.local_experts).sum(-1, dtype=jnp.int32)
        starts_P = jnp.cumsum(counts_P) - counts_P
        return Routing(plan.order, plan.positions, expert_ids_MA, counts_P, starts_P)

    def num_rounds(self, routing: Routing) -> jax.Array:
        return jnp.maximum(-(-jnp.max(routing.counts_P) // self.bucket), 1)

    def sent_rows(self, routing: Routing, num_rounds: jax.Array) -> jax.Array:
        """Rows of the buckets for every device, filled or not [P]."""
        return jnp.full(self.ranks, num_rounds.astype(jnp.float32) * self.bucket)

    def size_bytes(self) -> int:
        """No counts are sent."""
        return 0

    def send(self, x: Any, routing: Routing, turn) -> Arrived:
        """Rows ``turn * bucket ...`` of every bucket on their way to the experts."""
        assignment_PC, valid_PC, slot_MA = self._lanes(routing, turn)
        token_PC = assignment_PC // slot_MA.shape[1]
        expert_PC = routing.expert_MA.reshape(-1)[assignment_PC] % self.local_experts
        expert_PC = jnp.where(valid_PC, expert_PC, self.local_experts)

        def swapped(a_PC):
            return checkpoint_name(self.link.swap(a_PC), DISPATCHED)

        def moved(x_ML):
            recv_PCL = swapped(_take(x_ML, token_PC, valid_PC, slot_MA))
            return recv_PCL.reshape(-1, recv_PCL.shape[-1])

        plan = plan_permute(swapped(expert_PC).reshape(-1, 1), self.local_experts)
        return Arrived(jax.tree.map(moved, x), plan)

    def start(self, like_ML: jax.Array, weights_MA: jax.Array) -> jax.Array:
        """What `collect` adds to before any round."""
        return jnp.zeros(like_ML.shape, weights_MA.dtype if self.wide_sums else like_ML.dtype)

    def collect(self, out_RL: jax.Array, weights_MA, routing: Routing, turn, so_far=None):
        """Weighted sum of what comes back [M, L], float32 or wider, added to `so_far`."""
        assignment_PC, valid_PC, slot_MA = self._lanes(routing, turn)
        out_PCL = out_RL.reshape(self.ranks, self.bucket, out_RL.shape[-1])
        back_PCL = checkpoint_name(self.link.swap(out_PCL), RETURNED)
        sum_ML = _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)
        sum_ML = sum_ML if self.wide_sums else sum_ML.astype(out_RL.dtype)
        return sum_ML if so_far is None else so_far + sum_ML

    def finish(self, sum_ML: jax.Array, weights_MA, routing: Routing) -> jax.Array:
        return checkpoint_name(sum_ML, RETURNED)

    def _lanes(self, routing: Routing, turn):
        """What this round's buckets hold.

        Returns:
          The assignment in each lane, whether there is one, and the slot (device * bucket + lane)
          of each assignment: one past the last where it has none this round.
        """
        lane = turn * self.bucket + jnp.arange(self.bucket, dtype=jnp.int32)
        valid_PC = lane[None] < routing.counts_P[:, None]
        source_PC = jnp.where(valid_PC, routing.starts_P[:, None] + lane[None], 0)
        rank_MA = jnp.minimum(routing.expert_MA // self.local_experts, self.ranks - 1)
        lane_MA = routing.place_MA - routing.starts_P[rank_MA] - turn * self.bucket
        here = (lane_MA >= 0) & (lane_MA < self.bucket)
        here &= routing.expert_MA < self.ranks * self.local_experts
        slot_MA = jnp.where(here, rank_MA * self.bucket + lane_MA, self.ranks * self.bucket)
        return routing.order_R[source_PC], valid_PC, slot_MA


def _padded(x_PCL: jax.Array) -> jax.Array:
    """Slots in one list with a row of zeros past the last, for assignments that are not here."""
    flat = x_PCL.reshape(-1, x_PCL.shape[-1])
    return jnp.concatenate([flat, jnp.zeros_like(flat[:1])])


def _by_choice(x_PCL: jax.Array, slot_MA: jax.Array) -> list[jax.Array]:
    """Every token's row for its first choice, its second, ...

    One at a time they fuse into a sum, and [M, A, L] never exists.
    """
    slots_NL = _padded(x_PCL)
    return [slots_NL[slot_M] for slot_M in slot_MA.T]


# Both movements are gathers in both directions: a token knows its slots and a slot its token, so no
# scatter is needed.
@jax.custom_vjp
def _take(x_ML, token_PC, valid_PC, slot_MA):
    return jnp.where(valid_PC[..., None], x_ML[token_PC], 0)


def _take_fwd(x_ML, token_PC, valid_PC, slot_MA):
    return _take(x_ML, token_PC, valid_PC, slot_MA), slot_MA


def _take_bwd(slot_MA, dout_PCL):
    wide = jnp.promote_types(dout_PCL.dtype, jnp.float32)
    parts = [rows_ML.astype(wide) for rows_ML in _by_choice(dout_PCL, slot_MA)]
    dx_ML = functools.reduce(jnp.add, parts)
    return dx_ML.astype(dout_PCL.dtype), None, None, None


_take.defvjp(_take_fwd, _take_bwd)


@jax.custom_vjp
def _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA):
    pairs = zip(_by_choice(back_PCL, slot_MA), weights_MA.T, strict=True)
    parts = [rows_ML.astype(w_M.dtype) * w_M[:, None] for rows_ML, w_M in pairs]
    return functools.reduce(jnp.add, parts)


def _put_fwd(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA):
    out = _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)
    return out, (back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)


def _put_bwd(residuals, dout_ML):
    back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA = residuals
    weight_PC = jnp.where(valid_PC, weights_MA.reshape(-1)[assignment_PC], 0)
    dback_PCL = weight_PC[..., None] * dout_ML[assignment_PC // weights_MA.shape[1]]
    rows = _by_choice(back_PCL, slot_MA)
    dots = [jnp.sum(r_ML.astype(dout_ML.dtype) * dout_ML, -1) for r_ML in rows]
    dweights_MA = jnp.stack(dots, axis=1)
    return dback_PCL.astype(back_PCL.dtype), dweights_MA.astype(weights_MA.dtype), None, None, None


_put.defvjp(_put_fwd, _put_bwd)
