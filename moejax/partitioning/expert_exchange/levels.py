"""How often a token is sent: once for each of its experts, of its devices, or of its hosts.

At levels "device" and "host" a token goes once to every group of experts it needs, whatever the
number of experts there. Its row brings along the token's expert ids and combine weights; the group
runs the experts, sums their weighted outputs in float32 and sends one row back. At level "host" a
group is a host: the row crosses the network to the device at the sender's own place in that host,
which sends it on inside by level "device" and sums what comes back.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.partitioning.expert_exchange import rounds
from moejax.partitioning.expert_exchange.collective import Link
from moejax.partitioning.expert_exchange.padded import Padded
from moejax.partitioning.expert_exchange.ragged import Ragged
from moejax.partitioning.expert_exchange.rounds import Arrived, Need
from moejax.partitioning.expert_exchange.windows import Windows, sorted_experts

LEVELS = ("expert", "device", "host")


class Parcel(NamedTuple):
    """A token and what its receiver must know of it."""

    rows_ML: jax.Array
    # Combine weights, then expert ids: both in one array, where a float32 holds any id exactly.
    told_MA2: jax.Array


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all hops of an exchange share, static.

    Attributes:
      kind: "padded" or "ragged".
      link: the devices that share the experts.
      ranks: how many they are.
      num_experts: of all of them.
      top_k: experts of a token.
      buffer_factor, receive_factor: see `exchange_experts`.
      all_axes: mesh axes whose devices must take the same number of rounds.
    """

    kind: str
    link: Link
    ranks: int
    num_experts: int
    top_k: int
    buffer_factor: float
    receive_factor: float
    all_axes: tuple[str, ...]

    def exchange(self, need: Need, link: Link) -> Padded | Ragged:
        if self.kind == "padded":
            return Padded.sized(need, self.buffer_factor, link)
        return Ragged.sized(need, self.receive_factor, link)


def routed_experts(
    setup: Setup, level: str, x_ML, expert_ids_MA, weights_MA, weights, expert_fn, *,
    num_experts: int, slices: int,
):  # fmt: skip
    """Σ over a token's experts of weight times expert output; call it inside shard_map.

    Args:
      setup: of the exchange.
      level: one of `LEVELS`.
      x_ML, expert_ids_MA, weights_MA: this device's tokens; id `num_experts` means no expert.
      weights: pytree of this device's expert weights [e, ...].
      expert_fn: ``(weights, rows, group_sizes) -> rows``.
      slices: how many the tokens are cut into.
    Returns:
      [M, L] in x's dtype, and ExchangeStats of this device.
    """
    if level == "expert":
        return rounds.routed_experts(
            functools.partial(_by_expert, setup), x_ML, expert_ids_MA, weights_MA, weights,
            functools.partial(rounds.through_experts, expert_fn),
            num_experts=num_experts, slices=slices, all_axes=setup.all_axes,
        )  # fmt: skip
    link = setup.link
    whole = level == "device" or link.near == 1
    # Tokens of a slice: what an even routing brings to a device is counted from them, at every hop.
    tokens = -(-x_ML.shape[0] // max(min(slices, x_ML.shape[0]), 1))
    experts = functools.partial(_local_experts, setup, tokens, expert_fn)
    if whole:
        hop = Hop(setup, link, setup.ranks, setup.ranks, tokens, experts)
    else:
        inside, across = link._replace(part="inside"), link._replace(part="across")
        fan_out = Hop(setup, inside, link.near, setup.ranks, tokens, experts, bounded=True)
        hop = Hop(setup, across, link.hosts, link.hosts, tokens, fan_out)
    return hop(x_ML, expert_ids_MA, weights_MA, weights, slices=slices)


def _by_expert(setup: Setup, tokens: int) -> Padded | Ragged:
    rows = tokens * setup.top_k
    local = setup.num_experts // setup.ranks
    return setup.exchange(Need(setup.ranks, local, rows, rows, rows), setup.link)


@dataclasses.dataclass(frozen=True)
class Hop:
    """Sends tokens once to every group of experts they need, and sums what comes back.

    Attributes:
      setup: of the exchange.
      link: the devices of this hop, one for each group.
      ranks: how many they are.
      groups: into how many groups of this size all experts fall.
      tokens: of a slice on the device that the tokens came from.
      then: ``(rows, ids, weights, expert weights, in_loop=) -> rows, ExchangeStats``: what becomes
        of rows that arrived, with ids counted from the group's first expert.
      bounded: what arrived by an earlier hop is sent on, which may be much more than usual.
    """

    setup: Setup
    link: Link
    ranks: int
    groups: int
    tokens: int
    then: Callable
    bounded: bool = False

    @property
    def experts(self) -> int:
        """Experts of a group."""
        return self.setup.num_experts // self.groups

    def __call__(
        self, x_ML, expert_ids_MA, weights_MA, weights, *, slices: int = 1, in_loop: bool = False
    ):
        wide = jnp.promote_types(weights_MA.dtype, jnp.float32)
        told_MA2 = jnp.concatenate([weights_MA.astype(wide), expert_ids_MA.astype(wide)], 1)
        groups_MK = distinct_groups(expert_ids_MA, self.ranks, self.experts)
        return rounds.routed_experts(
            self._exchange, Parcel(x_ML, told_MA2), groups_MK, jnp.ones(groups_MK.shape, wide),
            weights, self._serve, num_experts=self.ranks, slices=slices,
            all_axes=self.setup.all_axes, in_loop=in_loop,
        )  # fmt: skip

    def _exchange(self, tokens: int) -> Padded | Ragged:
        share = self.tokens * even_copies(self.setup.num_experts, self.groups, self.setup.top_k)
        rows = tokens * min(self.setup.top_k, self.ranks)
        return self.setup.exchange(
            Need(self.ranks, 1, rows, share, tokens, self.bounded), self.link
        )

    def _serve(self, weights, arrived: Arrived, in_loop: bool):
        rows_CL, told_CA2 = arrived.rows
        weights_CA, ids_CA = jnp.split(told_CA2, 2, axis=1)
        here_C1 = arrived.plan.positions < jnp.sum(arrived.plan.group_sizes)
        # What no sender wrote may be anything: no number is made of it.
        ids_CA = jnp.where(here_C1, ids_CA, -1).astype(jnp.int32) - self.link.me() * self.experts
        mine_CA = (ids_CA >= 0) & (ids_CA < self.experts)
        ids_CA = jnp.where(mine_CA, ids_CA, self.experts)
        weights_CA = jnp.where(mine_CA, weights_CA, 0)
        return self.then(rows_CL, ids_CA, weights_CA, weights, in_loop=in_loop)


def _local_experts(
    setup: Setup, tokens: int, expert_fn, rows_CL, ids_CA, weights_CA, weights, *, in_loop: bool
):
    """`then` of a hop whose groups are single devices: the experts, a window of rows at a time."""
    num_experts, share = setup.num_experts // setup.ranks, tokens * setup.top_k
    size = ids_CA.size
    return rounds.routed_experts(
        lambda _: Windows.sized(num_experts, size, share, setup.receive_factor),
        rows_CL, ids_CA, weights_CA, weights, functools.partial(sorted_experts, expert_fn),
        num_experts=num_experts, slices=1, all_axes=(), in_loop=in_loop,
    )  # fmt: skip


def distinct_groups(expert_ids_MA: jax.Array, groups: int, experts: int) -> jax.Array:
    """The groups that each token needs, each once: int32 [M, min(A, groups)].

    Args:
      groups: how many; this number stands in places without one.
      experts: of a group; they are numbered group by group.
    """
    group_MA = jnp.minimum(expert_ids_MA // experts, groups)
    top_k = expert_ids_MA.shape[1]
    if top_k > groups:
        place_P = jnp.arange(groups, dtype=group_MA.dtype)
        hit_MP = jnp.any(group_MA[:, :, None] == place_P, axis=1)
        return jnp.where(hit_MP, place_P, groups)
    same_MAA = group_MA[:, :, None] == group_MA[:, None, :]
    seen_MA = jnp.any(same_MAA & jnp.tril(jnp.ones((top_k, top_k), bool), -1), axis=2)
    return jnp.where(seen_MA, groups, group_MA)


def even_copies(num_experts: int, groups: int, top_k: int) -> float:
    """Groups that a token needs on average, if every choice of `top_k` experts is as likely.

    groups · (1 − C(E − E/groups, A) / C(E, A))
    """
    others = num_experts - num_experts // groups
    return groups * (1 - math.comb(others, top_k) / math.comb(num_experts, top_k))


def check_level(level: str, exchange: str, ranks: int, hosts: int) -> None:
    """Says in one line what is wrong, where a mesh cannot serve a level.

    Raises:
      ValueError: `level` is unknown, or "host" and the experts' devices do not fall into hosts.
    """
    if level not in LEVELS:
        raise ValueError(f"exchange level {level!r} is unknown. Use one of {', '.join(LEVELS)}.")
    if ranks % max(hosts, 1):
        raise ValueError(
            f"{hosts} hosts do not share {ranks} devices along the expert axis evenly. Use a "
            "number of hosts that divides them."
        )
    if level == "host" and exchange != "local" and hosts < 2:
        raise ValueError(
            f"exchange level 'host' needs the {ranks} devices along the expert axis on several "
            "hosts. Set mesh.dcn.expert to their number, or use level 'device'."
        )
