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
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from moejax.partitioning.expert_exchange.local import ExchangeStats
from pallas_kernels.permute import PermutePlan, permute, unpermute

# Names of what went through an exchange, for rematerialisation policies: one that keeps both sends
# nothing again in the backward pass (further rounds, which keep nothing, excepted).
DISPATCHED = "moe_dispatched"
RETURNED = "moe_returned"


class Arrived(NamedTuple):
    """What a device received, and its sort by local expert."""

    rows: Any  # [C, L], or a pytree of such arrays that went together
    plan: PermutePlan


class Need(NamedTuple):
    """What an exchange is sized for; rows and experts of one device."""

    ranks: int
    local_experts: int
    rows: int  # assignments it has to send at most
    share: float  # rows it sends, and receives, under an even routing
    most_to_one: int  # rows it may have for one device
    bounded: bool = False  # `rows` is too many to hold at a time, or to sum up in wide numbers


@dataclasses.dataclass(frozen=True)
class Program:
    """What a round runs, all static.

    Attributes:
      exchange: `Padded`, `Ragged` or `Windows`.
      serve: ``(weights, Arrived, in_loop) -> rows, ExchangeStats``: what becomes of arrived rows.
      in_loop: this exchange runs inside the loop of another. Then all its rounds are in its own
        loop: a straight first round would be one more copy of the experts' code for every loop.
    """

    exchange: Any
    serve: Callable
    in_loop: bool


def routed_experts(
    make_exchange, x, expert_ids_MA, weights_MA, weights, serve, *, num_experts: int,
    slices: int, all_axes: tuple[str, ...], in_loop: bool = False,
):  # fmt: skip
    """Σ over a token's experts of weight times expert output; call it inside shard_map.

    Args:
      make_exchange: number of tokens in a slice -> `Padded`, `Ragged` or `Windows` for them.
      x: this device's tokens [M, L], or a pytree of such arrays whose first is the tokens and whose
        others go with them.
      expert_ids_MA: int32; `num_experts` means no expert.
      weights_MA: float32 combine weights.
      weights: pytree of this device's expert weights [e, ...].
      serve: see `Program`.
      slices: how many the tokens are cut into, at most as many as there are tokens.
      all_axes: mesh axes whose devices must take the same number of rounds.
      in_loop: see `Program`.
    Returns:
      [M, L] in x's dtype, and ExchangeStats of this device.
    """
    num_tokens = expert_ids_MA.shape[0]
    slices = max(min(slices, num_tokens), 1)
    x_s, weights_sMA = _cut(x, slices, 0), _cut(weights_MA, slices, 0)
    ids_sMA = _cut(expert_ids_MA, slices, num_experts)
    exchange = make_exchange(ids_sMA[0].shape[0])
    program = Program(exchange, serve, in_loop and not exchange.never_overflows)
    routings = [exchange.route(ids_MA) for ids_MA in ids_sMA]
    num_rounds = functools.reduce(jnp.maximum, map(exchange.num_rounds, routings))
    if all_axes:
        num_rounds = checkpoint_name(lax.pmax(num_rounds, all_axes), DISPATCHED)
    if program.in_loop:
        starts = [exchange.start(_rows(a), w) for a, w in zip(x_s, weights_sMA, strict=True)]
        back_s, stats = starts, ExchangeStats.nothing_sent()
    else:
        back_s, stats = _first_rounds(program, x_s, weights_sMA, weights, routings, in_loop)
    if not exchange.never_overflows:
        routed = (x_s, weights_sMA, weights, routings, num_rounds)
        back_s, more = _add_further_rounds(program, back_s, *routed)
        stats = stats.plus(more)
    out_sML = [
        exchange.finish(*part).astype(_rows(x).dtype)
        for part in zip(back_s, weights_sMA, routings, strict=True)
    ]
    for routing in routings:
        stats = stats.plus(_count(exchange, routing, num_rounds, x))
    return out_sML[0] if slices == 1 else jnp.concatenate(out_sML)[:num_tokens], stats


def _rows(x: Any) -> jax.Array:
    """The tokens among what travels together."""
    return jax.tree.leaves(x)[0]


def _count(exchange, routing, num_rounds, x) -> ExchangeStats:
    """Rows and bytes of one slice that leave this device in the forward pass."""
    rounds = num_rounds.astype(jnp.float32)
    if exchange.link is None:
        return ExchangeStats.nothing_sent(rounds)
    there = sum(a.shape[1] * a.dtype.itemsize for a in jax.tree.leaves(x))
    back = _rows(x).shape[1] * _rows(x).dtype.itemsize
    rows_P = exchange.sent_rows(routing, num_rounds)
    bytes_P = rows_P * (there + exchange.told_bytes + back) + exchange.size_bytes()
    away_P = jnp.arange(exchange.ranks, dtype=jnp.int32) != exchange.link.me()
    far_P = exchange.link.leaves_host(exchange.ranks)
    sums = [jnp.sum(jnp.where(m, a, 0)) for m in (away_P, far_P) for a in (rows_P, bytes_P)]
    return ExchangeStats(rounds, *sums)


def through_experts(expert_fn, weights, arrived: Arrived, in_loop: bool):
    """`serve` of rows that each arrived for one expert."""
    rows_RL = permute(arrived.rows, arrived.plan)
    out_RL = expert_fn(weights, rows_RL, arrived.plan.group_sizes)
    wide = jnp.promote_types(out_RL.dtype, jnp.float32)
    ones = jnp.ones((out_RL.shape[0], 1), wide)
    return unpermute(out_RL, ones, arrived.plan), ExchangeStats.nothing_sent()


def _cut(x: Any, slices: int, fill) -> list[Any]:
    """Equal slices of the rows; `fill` stands behind the last row."""
    if slices == 1:
        return [x]

    def parts(x_ML):
        missing = ((0, -x_ML.shape[0] % slices), (0, 0))
        return jnp.split(jnp.pad(x_ML, missing, constant_values=fill), slices)

    leaves, kind = jax.tree.flatten(x)
    return [jax.tree.unflatten(kind, part) for part in zip(*map(parts, leaves), strict=True)]


def _first_rounds(program: Program, x_s, weights_sMA, weights, routings, in_loop: bool):
    """The first round of every slice, overlapping as the module says.

    Each barrier puts the next departure behind this arrival and behind the experts before it: the
    exchanges keep their order, and no more than two slices wait in buffers. The experts of this
    slice are not made to wait for anything.
    """
    exchange, turn = program.exchange, jnp.int32(0)
    arrived, done, back_s = exchange.send(x_s[0], routings[0], turn), None, []
    last, stats = len(routings) - 1, ExchangeStats.nothing_sent()
    for i in range(last + 1):
        ahead = None
        if i < last:
            x, rows, done = lax.optimization_barrier((x_s[i + 1], arrived.rows, done))
            arrived = arrived._replace(rows=rows)
            ahead = exchange.send(x, routings[i + 1], turn)
        out_CL, served = program.serve(weights, arrived, in_loop)
        stats = stats.plus(served)
        if done is not None:
            back_s.append(exchange.collect(done, weights_sMA[i - 1], routings[i - 1], turn))
        arrived, done = ahead, out_CL
    return [*back_s, exchange.collect(done, weights_sMA[last], routings[last], turn)], stats


def _add_further_rounds(program, back_s, x_s, weights_sMA, weights, routings, num_rounds):
    """`back_s` with what the further rounds bring, and their stats."""
    stack = lambda parts: jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)  # noqa: E731
    first = stack(back_s)
    in_place = program.exchange.writes_in_place or program.in_loop
    start = first if in_place else jnp.zeros_like(first)
    further, stats = _further_rounds(
        program, stack(x_s), stack(weights_sMA), weights, stack(routings), num_rounds, start
    )
    return list(further if in_place else first + further), stats


def _one_round(program: Program, turn, routing, so_far, x, weights_MA, weights):
    arrived = program.exchange.send(x, routing, turn)
    out_CL, stats = program.serve(weights, arrived, True)
    return program.exchange.collect(out_CL, weights_MA, routing, turn, so_far), stats


def _steps(program: Program, num_rounds, slices: int):
    """First step of the loop and the one past the last; a step is one round of one slice."""
    return jnp.int32(0 if program.in_loop else slices), slices * num_rounds


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further_rounds(program, x_s, weights_sMA, weights, routing_s, num_rounds, back_s):
    """`back_s` after the rounds 1, 2, ... `num_rounds` - 1 of every slice, and their stats."""
    slices = weights_sMA.shape[0]
    begin, end = _steps(program, num_rounds, slices)

    def body(state):
        step, back_s, stats = state
        i = step % slices
        routing, x, weights_MA = _slice_of((routing_s, x_s, weights_sMA), i)
        turn = step // slices
        back, served = _one_round(program, turn, routing, back_s[i], x, weights_MA, weights)
        return step + 1, back_s.at[i].set(back), stats.plus(served)

    start = (begin, back_s, ExchangeStats.nothing_sent())
    _, back_s, stats = lax.while_loop(lambda s: s[0] < end, body, start)
    return back_s, stats


def _further_fwd(program, *primals):
    x_s, weights_sMA, weights, routing_s, num_rounds, back_s = jax.tree.map(
        lambda p: p.value, primals
    )
    # Which experts' weights are differentiated, told to the backward pass without arrays: it is
    # static, and frozen weights (packed ones are no floats either) cost nothing.
    wanted = tuple(
        () if p.perturbed and jnp.issubdtype(p.value.dtype, jnp.inexact) else None
        for p in jax.tree.leaves(primals[2])
    )
    out = _further_rounds(program, x_s, weights_sMA, weights, routing_s, num_rounds, back_s)
    return out, (x_s, weights_sMA, weights, routing_s, num_rounds, wanted)


def _further_bwd(program, residuals, cotangents):
    x_s, weights_sMA, weights, routing_s, num_rounds, wanted = residuals
    dback_s, _ = cotangents
    if isinstance(dback_s, jax.custom_derivatives.SymbolicZero):
        dback_s = jnp.zeros(dback_s.shape, dback_s.dtype)
    slices = weights_sMA.shape[0]
    begin, end = _steps(program, num_rounds, slices)
    leaves, kind = jax.tree.flatten(weights)
    places = [n for n, mark in enumerate(wanted) if mark is not None]
    chosen = [leaves[n] for n in places]

    def filled(values, rest):
        by_place = dict(zip(places, values, strict=True))
        return jax.tree.unflatten(kind, [by_place.get(n, a) for n, a in enumerate(rest)])

    def body(state):
        step, (dx_s, dweights_sMA, dchosen) = state
        i = step % slices
        routing, dback, x, weights_MA = _slice_of((routing_s, dback_s, x_s, weights_sMA), i)

        def one_round(x, weights_MA, chosen):
            experts = filled(chosen, leaves)
            return _one_round(program, step // slices, routing, None, x, weights_MA, experts)

        _, pull, _ = jax.vjp(one_round, x, weights_MA, chosen, has_aux=True)
        dx, dweights_MA, new = pull(dback)
        dchosen = jax.tree.map(lambda total, g: total + g.astype(total.dtype), dchosen, new)
        dx_s = jax.tree.map(lambda total, g: total.at[i].add(g.astype(total.dtype)), dx_s, dx)
        return step + 1, (dx_s, dweights_sMA.at[i].add(dweights_MA), dchosen)

    primals = (x_s, weights_sMA, chosen)
    wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))  # noqa: E731
    # Wide sums of the experts' gradients would be the largest arrays of a training step; each round
    # rounds its own once, as the first one does. The same holds of rows where there are so many;
    # each gets few terms, nearly always one.
    narrow = functools.partial(jax.tree.map, jnp.zeros_like)
    dx_s = jax.tree.map(wide, x_s) if program.exchange.wide_sums else narrow(x_s)
    zeros = (dx_s, wide(weights_sMA), narrow(chosen))
    _, grads = lax.while_loop(lambda s: s[0] < end, body, (begin, zeros))
    dx_s, dweights_sMA, dchosen = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, primals)
    dweights = filled(dchosen, [None] * len(leaves))
    # What the rounds started from passes through: no round reads it.
    return dx_s, dweights_sMA, dweights, None, None, dback_s


_further_rounds.defvjp(_further_fwd, _further_bwd, symbolic_zeros=True)


def _slice_of(tree: Any, i) -> Any:
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), tree)
