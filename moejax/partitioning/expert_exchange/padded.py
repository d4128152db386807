"""All-to-all with fixed buckets: runs on every platform and loses no token.

Each device keeps a bucket of `bucket` rows for every other device of the ``expert`` axis. One round
fills the buckets, sends them, runs the experts on what arrived, sends the results back and adds
them up. The first round takes nearly everything; where a hot expert leaves rows behind, further
rounds follow until none is left. So memory is bounded by the buffer and not by the worst routing,
and the answer never depends on the routing's balance.

The first round is differentiated as ordinary code. The further rounds are a loop whose length is
known only at run time, which reverse mode cannot see through: they carry their own gradient, the
same loop over the rounds' vjps.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moejax.partitioning.expert_exchange.local import ExchangeStats
from pallas_kernels.permute import permute, plan_permute, unpermute


class Routing(NamedTuple):
    """Where every assignment stands once they are sorted by expert (all int32)."""

    order_R: jax.Array  # assignment at each sorted place
    place_MA: jax.Array  # sorted place of each assignment
    expert_MA: jax.Array  # its expert; num_experts = none
    counts_P: jax.Array  # rows for each device
    starts_P: jax.Array  # first sorted place of each device's rows


class Geometry(NamedTuple):
    """Static sizes of the exchange."""

    ranks: int
    local_experts: int
    bucket: int
    axis: str

    @property
    def num_experts(self) -> int:
        return self.ranks * self.local_experts


def bucket_rows(num_rows: int, ranks: int, buffer_factor: float) -> int:
    """Rows of one bucket.

    `buffer_factor` times an even share, a multiple of 8, at most all rows.
    """
    share = math.ceil(buffer_factor * num_rows / ranks)
    return min(-(-share // 8) * 8, num_rows)


def routed_experts(
    x_ML, expert_ids_MA, weights_MA, weights, expert_fn, *, num_experts: int, buffer_factor: float,
    axis: str = "expert", all_axes: tuple[str, ...] = ("expert",),
):  # fmt: skip
    """Σ over a token's experts of weight times expert output; call it inside shard_map.

    Args:
      x_ML, expert_ids_MA, weights_MA: this device's tokens; id `num_experts` means no expert.
      weights: pytree of this device's expert weights [e, ...].
      expert_fn: ``(weights, rows, group_sizes) -> rows``.
      buffer_factor: size of the send buffer relative to an even routing.
      axis: mesh axis that holds the experts.
      all_axes: mesh axes whose devices must take the same number of rounds.
    Returns:
      [M, L] in x's dtype, and ExchangeStats.
    """
    ranks = lax.axis_size(axis)
    bucket = bucket_rows(expert_ids_MA.size, ranks, buffer_factor)
    geometry = Geometry(ranks, num_experts // ranks, bucket, axis)
    routing = _routing(expert_ids_MA, geometry)
    most = lax.pmax(jnp.max(routing.counts_P), all_axes)
    num_rounds = jnp.maximum(-(-most // bucket), 1)
    out_ML = _one_round(expert_fn, geometry, x_ML, weights_MA, weights, routing, jnp.int32(0))
    out_ML = out_ML + _further_rounds(
        expert_fn, geometry, x_ML, weights_MA, weights, routing, num_rounds
    )
    sent = num_rounds.astype(jnp.float32) * (ranks * bucket)
    return out_ML.astype(x_ML.dtype), ExchangeStats(num_rounds.astype(jnp.float32), sent)


def _routing(expert_ids_MA: jax.Array, geometry: Geometry) -> Routing:
    plan = plan_permute(expert_ids_MA, geometry.num_experts)
    counts_P = plan.group_sizes.reshape(geometry.ranks, geometry.local_experts).sum(
        -1, dtype=jnp.int32
    )
    starts_P = jnp.cumsum(counts_P) - counts_P
    return Routing(plan.order, plan.positions, expert_ids_MA, counts_P, starts_P)


def _one_round(
    expert_fn, geometry: Geometry, x_ML, weights_MA, weights, routing: Routing, turn
) -> jax.Array:
    """Rows ``turn * bucket ...`` of every bucket: out, through the experts, back.

    Returns:
      [M, L], float32 or wider.
    """
    experts_per_token = weights_MA.shape[1]
    lane = turn * geometry.bucket + jnp.arange(geometry.bucket, dtype=jnp.int32)
    valid_PC = lane[None] < routing.counts_P[:, None]
    source_PC = jnp.where(valid_PC, routing.starts_P[:, None] + lane[None], 0)
    assignment_PC = routing.order_R[source_PC]
    slot_MA = _slots(geometry, routing, turn)

    send_PCL = _take(x_ML, assignment_PC // experts_per_token, valid_PC, slot_MA)
    expert_PC = routing.expert_MA.reshape(-1)[assignment_PC] % geometry.local_experts
    expert_PC = jnp.where(valid_PC, expert_PC, geometry.local_experts)
    recv_PCL, recv_expert_PC = (_swap(a, geometry.axis) for a in (send_PCL, expert_PC))

    plan = plan_permute(recv_expert_PC.reshape(-1, 1), geometry.local_experts)
    rows_RL = permute(recv_PCL.reshape(-1, recv_PCL.shape[-1]), plan)
    out_RL = expert_fn(weights, rows_RL, plan.group_sizes)
    ones = jnp.ones((out_RL.shape[0], 1), weights_MA.dtype)
    back_PCL = _swap(unpermute(out_RL, ones, plan).reshape(recv_PCL.shape), geometry.axis)
    return _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)


def _slots(geometry: Geometry, routing: Routing, turn) -> jax.Array:
    """Bucket slot (device * bucket + lane) of each assignment in this round.

    One past the last where it has none.
    """
    rank_MA = jnp.minimum(routing.expert_MA // geometry.local_experts, geometry.ranks - 1)
    lane_MA = routing.place_MA - routing.starts_P[rank_MA] - turn * geometry.bucket
    here = (lane_MA >= 0) & (lane_MA < geometry.bucket) & (routing.expert_MA < geometry.num_experts)
    return jnp.where(here, rank_MA * geometry.bucket + lane_MA, geometry.ranks * geometry.bucket)


def _swap(x_PC: jax.Array, axis: str) -> jax.Array:
    """Bucket p of every device goes to device p of the axis."""
    return lax.all_to_all(x_PC, axis, split_axis=0, concat_axis=0, tiled=True)


def _padded(x_PCL: jax.Array) -> jax.Array:
    """Slots in one list with a row of zeros past the last, for assignments that are not here."""
    flat = x_PCL.reshape(-1, x_PCL.shape[-1])
    return jnp.concatenate([flat, jnp.zeros_like(flat[:1])])


# Both movements are gathers in both directions: a token knows its slots and a slot its token, so no
# scatter is needed.
@jax.custom_vjp
def _take(x_ML, token_PC, valid_PC, slot_MA):
    return jnp.where(valid_PC[..., None], x_ML[token_PC], 0)


def _take_fwd(x_ML, token_PC, valid_PC, slot_MA):
    return _take(x_ML, token_PC, valid_PC, slot_MA), slot_MA


def _take_bwd(slot_MA, dout_PCL):
    wide = jnp.promote_types(dout_PCL.dtype, jnp.float32)
    dx_ML = jnp.sum(_padded(dout_PCL)[slot_MA], axis=1, dtype=wide)
    return dx_ML.astype(dout_PCL.dtype), None, None, None


_take.defvjp(_take_fwd, _take_bwd)


@jax.custom_vjp
def _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA):
    rows_MAL = _padded(back_PCL)[slot_MA]
    return jnp.einsum("mal,ma->ml", rows_MAL.astype(weights_MA.dtype), weights_MA)


def _put_fwd(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA):
    out = _put(back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)
    return out, (back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA)


def _put_bwd(residuals, dout_ML):
    back_PCL, weights_MA, assignment_PC, valid_PC, slot_MA = residuals
    weight_PC = jnp.where(valid_PC, weights_MA.reshape(-1)[assignment_PC], 0)
    dback_PCL = weight_PC[..., None] * dout_ML[assignment_PC // weights_MA.shape[1]]
    rows_MAL = _padded(back_PCL)[slot_MA]
    dweights_MA = jnp.einsum("mal,ml->ma", rows_MAL.astype(dout_ML.dtype), dout_ML)
    return dback_PCL.astype(back_PCL.dtype), dweights_MA.astype(weights_MA.dtype), None, None, None


_put.defvjp(_put_fwd, _put_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further_rounds(expert_fn, geometry, x_ML, weights_MA, weights, routing: Routing, num_rounds):
    """Sum of the rounds 1, 2, ... `num_rounds` - 1."""
    return _further_fwd(expert_fn, geometry, x_ML, weights_MA, weights, routing, num_rounds)[0]


def _further_fwd(expert_fn, geometry, x_ML, weights_MA, weights, routing, num_rounds):
    def body(state):
        turn, total_ML = state
        return turn + 1, total_ML + _one_round(
            expert_fn, geometry, x_ML, weights_MA, weights, routing, turn
        )

    zero_ML = jnp.zeros(x_ML.shape, weights_MA.dtype)
    _, total_ML = lax.while_loop(lambda s: s[0] < num_rounds, body, (jnp.int32(1), zero_ML))
    return total_ML, (x_ML, weights_MA, weights, routing, num_rounds)


def _further_bwd(expert_fn, geometry, residuals, dout_ML):
    x_ML, weights_MA, weights, routing, num_rounds = residuals
    primals = (x_ML, weights_MA, weights)

    def body(state):
        turn, grads = state
        one_round = functools.partial(_one_round, expert_fn, geometry, routing=routing, turn=turn)
        _, pull = jax.vjp(one_round, *primals)
        return turn + 1, jax.tree.map(
            lambda total, new: total + new.astype(total.dtype), grads, pull(dout_ML)
        )

    wide = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), primals
    )
    _, grads = lax.while_loop(lambda s: s[0] < num_rounds, body, (jnp.int32(1), wide))
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, primals)
    no_grad = jax.tree.map(_float0, (routing, num_rounds))
    return (*grads, *no_grad)


def _float0(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)


_further_rounds.defvjp(_further_fwd, _further_bwd)
