"""One door to every expert exchange: picks it, and runs it per device under the active mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from moejax.partitioning.expert_exchange import local, rounds
from moejax.partitioning.expert_exchange.collective import Link
from moejax.partitioning.expert_exchange.padded import Padded
from moejax.partitioning.expert_exchange.ragged import Ragged
from moejax.partitioning.rules import BATCH_AXES
from moejax.partitioning.shard import active_mesh
from pallas_kernels.choose import target_platform

EXCHANGES = ("local", "padded", "ragged")


def resolve_exchange(name: str, expert_axis: int, platform: str | None = None) -> str:
    """The exchange that `auto` stands for.

    Args:
      expert_axis: devices along ``expert``; with one there is nothing to exchange.
      platform: of the mesh's devices; None: the one that operators are lowered for. CPUs have no
        ragged all-to-all.
    """
    if name != "auto":
        return name
    if expert_axis == 1:
        return "local"
    return "padded" if (platform or target_platform()) == "cpu" else "ragged"


def exchange_experts(
    x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, *, num_experts: int,
    exchange: str = "auto", buffer_factor: float = 1.5, receive_factor: float = 1.25,
    slices: int = 1,
):  # fmt: skip
    """Σ over each token's experts of weight times expert output, wherever the experts live.

    Args:
      x_BTL: what the experts read, batch-sharded.
      expert_ids_BTA: int32 in [0, num_experts]; `num_experts` means no expert.
      weights_BTA: float32 combine weights.
      weights: pytree of expert weights [E, ...]; split over ``expert`` on dim 0, whole otherwise.
      expert_fn: ``(weights, rows, group_sizes) -> rows``, run on each device's own experts.
      exchange: one of `EXCHANGES`, or ``auto``.
      buffer_factor: rows of the padded exchange's send buffer, relative to an even routing.
      receive_factor: rows of the ragged exchange's receive buffer, relative to an even routing.
      slices: parts in which a device's tokens travel, so that exchange and experts overlap.
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
    ranks = mesh.shape["expert"]
    platform = _platform(mesh)
    name = resolve_exchange(exchange, ranks, platform)
    link = Link("expert", native=platform != "cpu")
    axes = tuple(mesh.axis_names)

    def sized(num_rows: int):
        if name == "padded":
            return Padded.sized(num_rows, ranks, num_experts, buffer_factor, "expert")
        return Ragged.sized(num_rows, ranks, num_experts, receive_factor, link)

    def per_device(x_BTL, expert_ids_BTA, weights_BTA, weights):
        run: Callable = local.routed_experts
        options: dict[str, Any] = {}
        if name != "local":
            run = functools.partial(rounds.routed_experts, sized)
            options = {"slices": slices, "all_axes": axes}
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


def _platform(mesh) -> str:
    """Platform of a mesh's devices; where jax does not tell, that of the lowering."""
    told = getattr(getattr(mesh, "abstract_device", None), "platform", None)
    return told or target_platform()


def _on_rows(run, x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, num_experts, **options):
    """The exchange on flattened tokens."""
    B, T, L = x_BTL.shape
    flat = [a.reshape(B * T, -1) for a in (x_BTL, expert_ids_BTA, weights_BTA)]
    out_ML, stats = run(*flat, weights, expert_fn, num_experts=num_experts, **options)
    return out_ML.reshape(B, T, L), stats
