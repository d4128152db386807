"""One door to every expert exchange: picks it, and runs it per device under the active mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from moejax.partitioning.expert_exchange import local, padded
from moejax.partitioning.expert_exchange.local import ExchangeStats
from moejax.partitioning.rules import BATCH_AXES
from moejax.partitioning.shard import active_mesh

EXCHANGES = ("local", "padded")


def resolve_exchange(name: str, expert_axis: int) -> str:
    """The exchange that `auto` stands for on a mesh with this many devices along ``expert``."""
    if name != "auto":
        return name
    return "padded" if expert_axis > 1 else "local"


def exchange_experts(
    x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, *, num_experts: int,
    exchange: str = "auto", buffer_factor: float = 1.5,
):  # fmt: skip
    """Σ over each token's experts of weight times expert output, wherever the experts live.

    Args:
      x_BTL: what the experts read, batch-sharded.
      expert_ids_BTA: int32 in [0, num_experts]; `num_experts` means no expert.
      weights_BTA: float32 combine weights.
      weights: pytree of expert weights [E, ...]; split over ``expert`` on dim 0, whole otherwise.
      expert_fn: ``(weights, rows, group_sizes) -> rows``, run on each device's own experts.
      exchange: one of `EXCHANGES`, or ``auto``.
      buffer_factor: size of a bounded send buffer relative to an even routing.
    Returns:
      [B, T, L], and ExchangeStats (largest over devices).
    """
    mesh = active_mesh()
    if mesh is None:
        if exchange not in ("auto", "local"):
            raise ValueError(
                f"exchange {exchange!r} needs a mesh with an expert axis; use 'auto' or 'local'."
            )
        return _on_rows(
            local.routed_experts,
            x_BTL,
            expert_ids_BTA,
            weights_BTA,
            weights,
            expert_fn,
            num_experts,
        )
    name = resolve_exchange(exchange, mesh.shape["expert"])
    axes = tuple(mesh.axis_names)

    def per_device(x_BTL, expert_ids_BTA, weights_BTA, weights):
        run: Callable = local.routed_experts
        options: dict[str, Any] = {}
        if name != "local":
            run, options = padded.routed_experts, {"buffer_factor": buffer_factor, "all_axes": axes}
        out, stats = _on_rows(
            run, x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, num_experts, **options
        )
        return out, jax.tree.map(lambda s: jax.lax.pmax(jax.lax.stop_gradient(s), axes), stats)

    rows, experts = P(BATCH_AXES), P("expert" if name != "local" else None)
    return jax.shard_map(
        per_device,
        in_specs=(rows, rows, rows, experts),
        out_specs=(rows, P()),
        check_vma=False,
    )(x_BTL, expert_ids_BTA, weights_BTA, weights)


def _on_rows(run, x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, num_experts, **options):
    """The exchange on flattened tokens."""
    B, T, L = x_BTL.shape
    flat = [a.reshape(B * T, -1) for a in (x_BTL, expert_ids_BTA, weights_BTA)]
    out_ML, stats = run(*flat, weights, expert_fn, num_experts=num_experts, **options)
    return out_ML.reshape(B, T, L), stats


def no_exchange_stats() -> ExchangeStats:
    """Stats of a layer without experts."""
    zero = jnp.zeros((), jnp.float32)
    return ExchangeStats(zero, zero)
