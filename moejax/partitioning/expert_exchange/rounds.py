"""What all bounded exchanges share: slices that overlap, and rounds until no row is left.

The tokens are cut into slices. In the order of the program, slice i + 1 leaves before slice i is
in the experts, and slice i - 1 returns after: so two exchanges are in the air while the experts
work, and the same holds in the backward pass, which is this order reversed.

A slice's first round takes nearly everything and is differentiated as ordinary code. Where its
buffer was too small, further rounds follow until nothing is left. Their number is known only at run
time, which reverse mode cannot see through: they carry their own gradient, the same loop over the
rounds' vjps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.partitioning.expert_exchange.local import ExchangeStats
from pallas_kernels.permute import PermutePlan, permute, unpermute

# Names of what went through an exchange, for rematerialisation policies: one that keeps both sends
# nothing again in the backward pass (further rounds, which keep nothing, excepted).
DISPATCHED = "moe_dispatched"
RETURNED = "moe_returned"


class Arrived(NamedTuple):
    """Rows as a device received them, and their sort by local expert."""

    rows_CL: jax.Array
    plan: PermutePlan


@dataclasses.dataclass(frozen=True)
class Program:
    """What a round runs, all static."""

    exchange: Any  # Padded or Ragged
    expert_fn: Callable


def routed_experts(
    make_exchange, x_ML, expert_ids_MA, weights_MA, weights, expert_fn, *, num_experts: int,
    slices: int, all_axes: tuple[str, ...],
):  # fmt: skip
    """Σ over a token's experts of weight times expert output; call it inside shard_map.

    Args:
      make_exchange: number of assignments in a slice -> `Padded` or `Ragged` of that size.
      x_ML, expert_ids_MA, weights_MA: this device's tokens; id `num_experts` means no expert.
      weights: pytree of this device's expert weights [e, ...].
      expert_fn: ``(weights, rows, group_sizes) -> rows``.
      slices: how many the tokens are cut into, at most as many as there are tokens.
      all_axes: mesh axes whose devices must take the same number of rounds.
    Returns:
      [M, L] in x's dtype, and ExchangeStats.
    """
    num_tokens = x_ML.shape[0]
    slices = max(min(slices, num_tokens), 1)
    x_sML, weights_sMA = _cut(x_ML, slices, 0), _cut(weights_MA, slices, 0)
    ids_sMA = _cut(expert_ids_MA, slices, num_experts)
    exchange = make_exchange(ids_sMA[0].size)
    program = Program(exchange, expert_fn)
    routings = [exchange.route(ids_MA) for ids_MA in ids_sMA]
    most = functools.reduce(jnp.maximum, map(exchange.num_rounds, routings))
    num_rounds = checkpoint_name(lax.pmax(most, all_axes), DISPATCHED)
    back_s = _first_rounds(program, x_sML, weights_sMA, weights, routings)
    if not exchange.never_overflows:
        routed = (x_sML, weights_sMA, weights, routings, num_rounds)
        back_s = _add_further_rounds(program, back_s, *routed)
    out_sML = [
        exchange.finish(*part).astype(x_ML.dtype)
        for part in zip(back_s, weights_sMA, routings, strict=True)
    ]
    sent = functools.reduce(jnp.add, [exchange.sent_rows(r, num_rounds) for r in routings])
    out_ML = out_sML[0] if slices == 1 else jnp.concatenate(out_sML)[:num_tokens]
    return out_ML, ExchangeStats(num_rounds.astype(jnp.float32), sent)


def _cut(x_M: jax.Array, slices: int, fill) -> list[jax.Array]:
    """Equal slices of the rows; `fill` stands behind the last row."""
    if slices == 1:
        return [x_M]
    missing = -x_M.shape[0] % slices
    widths = ((0, missing),) + ((0, 0),) * (x_M.ndim - 1)
    return list(jnp.split(jnp.pad(x_M, widths, constant_values=fill), slices))


def _first_rounds(program: Program, x_sML, weights_sMA, weights, routings) -> list[jax.Array]:
    """The first round of every slice, overlapping as the module says.

    Each barrier puts the next departure behind this arrival and behind the experts before it: the
    exchanges keep their order, and no more than two slices wait in buffers. The experts of this
    slice are not made to wait for anything.
    """
    exchange, turn = program.exchange, jnp.int32(0)
    arrived, done, back_s = exchange.send(x_sML[0], routings[0], turn), None, []
    last = len(routings) - 1
    for i in range(last + 1):
        ahead = None
        if i < last:
            x_ML, rows_CL, done = lax.optimization_barrier((x_sML[i + 1], arrived.rows_CL, done))
            arrived = arrived._replace(rows_CL=rows_CL)
            ahead = exchange.send(x_ML, routings[i + 1], turn)
        out_CL = _run_experts(program, weights, arrived)
        if done is not None:
            back_s.append(exchange.collect(done, weights_sMA[i - 1], routings[i - 1], turn))
        arrived, done = ahead, out_CL
    return [*back_s, exchange.collect(done, weights_sMA[last], routings[last], turn)]


def _run_experts(program: Program, weights, arrived: Arrived) -> jax.Array:
    """Rows through their experts, each at its own slot again."""
    rows_RL = permute(arrived.rows_CL, arrived.plan)
    out_RL = program.expert_fn(weights, rows_RL, arrived.plan.group_sizes)
    wide = jnp.promote_types(out_RL.dtype, jnp.float32)
    return unpermute(out_RL, jnp.ones((out_RL.shape[0], 1), wide), arrived.plan)


def _add_further_rounds(program, back_s, x_sML, weights_sMA, weights, routings, num_rounds):
    """`back_s` with what the further rounds bring."""
    stacked = [jnp.stack(a) for a in (x_sML, weights_sMA)]
    routing = jax.tree.map(lambda *parts: jnp.stack(parts), *routings)
    first = jnp.stack(back_s)
    in_place = program.exchange.writes_in_place
    start = first if in_place else jnp.zeros_like(first)
    further = _further_rounds(program, *stacked, weights, routing, num_rounds, start)
    return list(further if in_place else first + further)


def _one_round(program: Program, turn, routing, so_far, x_ML, weights_MA, weights):
    arrived = program.exchange.send(x_ML, routing, turn)
    out_CL = _run_experts(program, weights, arrived)
    return program.exchange.collect(out_CL, weights_MA, routing, turn, so_far)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further_rounds(program, x_sML, weights_sMA, weights, routing_s, num_rounds, back_s):
    """`back_s` after the rounds 1, 2, ... `num_rounds` - 1 of every slice."""
    return _further_fwd(program, x_sML, weights_sMA, weights, routing_s, num_rounds, back_s)[0]


def _further_fwd(program, x_sML, weights_sMA, weights, routing_s, num_rounds, back_s):
    slices = x_sML.shape[0]

    def body(state):
        step, back_s = state
        i = step % slices
        routing, x_ML, weights_MA = _slice_of((routing_s, x_sML, weights_sMA), i)
        turn = step // slices
        back = _one_round(program, turn, routing, back_s[i], x_ML, weights_MA, weights)
        return step + 1, back_s.at[i].set(back)

    end = slices * num_rounds
    _, back_s = lax.while_loop(lambda s: s[0] < end, body, (jnp.int32(slices), back_s))
    return back_s, (x_sML, weights_sMA, weights, routing_s, num_rounds)


def _further_bwd(program, residuals, dback_s):
    x_sML, weights_sMA, weights, routing_s, num_rounds = residuals
    slices = x_sML.shape[0]

    def body(state):
        step, (dx_sML, dweights_sMA, dweights) = state
        i = step % slices
        routing, dback, x_ML, weights_MA = _slice_of((routing_s, dback_s, x_sML, weights_sMA), i)
        one_round = functools.partial(_one_round, program, step // slices, routing, None)
        _, pull = jax.vjp(one_round, x_ML, weights_MA, weights)
        dx_ML, dweights_MA, new = pull(dback)
        dweights = jax.tree.map(lambda total, g: total + g.astype(total.dtype), dweights, new)
        dx_sML = dx_sML.at[i].add(dx_ML.astype(dx_sML.dtype))
        return step + 1, (dx_sML, dweights_sMA.at[i].add(dweights_MA), dweights)

    primals = (x_sML, weights_sMA, weights)
    zeros = jax.tree.map(
        lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)), primals
    )
    end = slices * num_rounds
    _, grads = lax.while_loop(lambda s: s[0] < end, body, (jnp.int32(slices), zeros))
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, primals)
    # What the rounds started from passes through: no round reads it.
    return (*grads, *jax.tree.map(_float0, (routing_s, num_rounds)), dback_s)


_further_rounds.defvjp(_further_fwd, _further_bwd)


def _slice_of(tree: Any, i) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)


def _float0(x: Any) -> np.ndarray:
    return np.zeros(np.shape(x), jax.dtypes.float0)
