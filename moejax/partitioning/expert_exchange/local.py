"""Every expert on every device: no exchange, only the local sort."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.permute import permute, plan_permute, unpermute

ExpertFn = Callable[[jax.Array, jax.Array], jax.Array]


class ExchangeStats(NamedTuple):
    """What an exchange counts while it runs (float32 scalars).

    Attributes:
      rounds: the most that any hop took, 1 where everything fitted.
      sent_rows: rows that left the device on their way to experts.
      sent_bytes: bytes that left it: those rows with what goes along, their results on the way
        back, and the counts that say how many there are. The backward pass sends the rows and
        results again, as gradients.
      network_rows, network_bytes: the part that left its host.
    """

    rounds: jax.Array
    sent_rows: jax.Array
    sent_bytes: jax.Array
    network_rows: jax.Array
    network_bytes: jax.Array

    @classmethod
    def nothing_sent(cls, rounds=1.0) -> ExchangeStats:
        zero = jnp.zeros((), jnp.float32)
        return cls(jnp.asarray(rounds, jnp.float32), zero, zero, zero, zero)

    def plus(self, other: ExchangeStats) -> ExchangeStats:
        """Both together: the most rounds, the sum of the rest."""
        total = jax.tree.map(jnp.add, self, other)
        return total._replace(rounds=jnp.maximum(self.rounds, other.rounds))


def dispatch(x_ML: jax.Array, expert_ids_MA: jax.Array, num_experts: int):
    """Token rows sorted by expert: ``(rows_RL, group_sizes_E, plan)``.

    Ids equal to `num_experts` go last.
    """
    plan = plan_permute(expert_ids_MA, num_experts)
    return permute(x_ML, plan), plan.group_sizes, plan


def combine(rows_RL: jax.Array, weights_MA: jax.Array, plan) -> jax.Array:
    """Weighted sum of each token's rows, in its own place again."""
    return unpermute(rows_RL, weights_MA, plan)


def routed_experts(x_ML, expert_ids_MA, weights_MA, weights, expert_fn, *, num_experts: int):
    """Σ over a token's experts of weight times expert output.

    Args:
      x_ML: what the experts read.
      expert_ids_MA: int32; `num_experts` means no expert.
      weights_MA: float32 combine weights.
      weights: pytree of expert weights [E, ...].
      expert_fn: ``(weights, rows, group_sizes) -> rows``.
    Returns:
      [M, L] in x's dtype, and ExchangeStats.
    """
    rows_RL, group_sizes_E, plan = dispatch(x_ML, expert_ids_MA, num_experts)
    out_ML = combine(expert_fn(weights, rows_RL, group_sizes_E), weights_MA, plan)
    return out_ML, ExchangeStats.nothing_sent()
