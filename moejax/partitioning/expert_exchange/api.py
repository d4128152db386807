"""One door to every expert exchange: picks it, and runs it per device under the active mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from moejax.partitioning.expert_exchange import levels, local
from moejax.partitioning.expert_exchange.collective import Link
from moejax.partitioning.expert_exchange.copies import Copies, with_copies
from moejax.partitioning.rules import BATCH_AXES, stored_layout
from moejax.partitioning.shard import active_mesh, gathered
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
    weight_axes=None, prepare: Callable | None = None, exchange: str = "auto",
    buffer_factor: float = 1.5, receive_factor: float = 1.25, slices: int = 1,
    level: str = "expert", hosts: int = 1, copies: Copies | None = None,
):  # fmt: skip
    """Σ over each token's experts of weight times expert output, wherever the experts live.

    Args:
      x_BTL: what the experts read, batch-sharded.
      expert_ids_BTA: int32 in [0, num_experts]; `num_experts` means no expert.
      weights_BTA: float32 combine weights.
      weights: pytree of expert weights [E, ...], as they are stored; floats are used in x's dtype.
      weight_axes: their logical axes, in the structure of `weights`; None: split over ``expert``
        on dim 0, whole otherwise. What has no dim "experts" in front is the same for all experts.
      prepare: done once to a device's experts, before any rows are there; `expert_fn` gets what it
        returns.
      expert_fn: ``(weights, rows, group_sizes) -> rows``, run on each device's own experts.
      exchange: one of `EXCHANGES`, or ``auto``.
      buffer_factor: rows of the padded exchange's send buffer, relative to an even routing.
      receive_factor: rows of the ragged exchange's receive buffer, relative to an even routing.
      slices: parts in which a device's tokens travel, so that exchange and experts overlap.
      level: a token is sent once for each of its experts, or of its devices, or of its hosts.
      hosts: how many share the ``expert`` axis, in equal runs; what crosses them is counted.
      copies: experts that devices repeat. The ids then count places through the devices, each
        one's experts and behind them its copies, and `num_experts` is the number of all places.
    Returns:
      [B, T, L], and ExchangeStats: the most rounds over devices, the mean of the rest.
    Raises:
      ValueError: the active mesh cannot serve the exchange or the level.
    """
    mesh = active_mesh()
    if mesh is None:
        if exchange not in ("auto", "local"):
            raise ValueError(
                f"exchange {exchange!r} needs a mesh with an expert axis; use 'auto' or 'local'."
            )
        if copies is not None:
            raise ValueError("copies of experts need a mesh whose expert axis they are made for.")
        return _on_rows(
            local.routed_experts,
            x_BTL,
            expert_ids_BTA,
            weights_BTA,
            _ready(weights, x_BTL.dtype, prepare),
            expert_fn,
            num_experts,
        )
    ranks = mesh.shape["expert"]
    platform = _platform(mesh)
    name = resolve_exchange(exchange, ranks, platform)
    levels.check_level(level, name, ranks, hosts)
    link = Link("expert", platform != "cpu", hosts, ranks // hosts)
    axes = tuple(mesh.axis_names)

    axis = "expert" if name != "local" else None
    layouts = _layouts(weights, weight_axes, axis, dict(mesh.shape))
    shared = _shared(weights, weight_axes)

    def per_device(x_BTL, expert_ids_BTA, weights_BTA, weights, sources_K):
        one = 1 + jnp.minimum(expert_ids_BTA[0, 0, 0], 0)
        gather = functools.partial(_gather, dtype=x_BTL.dtype, one=one, platform=platform)
        # What all experts share is whole on every device, its gradient summed over all of them.
        weights = jax.tree.map(
            lambda w, layout, whole: gather(w, layout, but=None if whole else axis),
            weights, layouts, shared,
        )  # fmt: skip
        if copies is not None:
            weights = with_copies(weights, copies._replace(sources_K=sources_K), link, shared)
        weights = prepare(weights) if prepare else weights
        run: Callable = local.routed_experts
        options: dict[str, Any] = {}
        if name != "local":
            setup = levels.Setup(
                name, link, ranks, num_experts, expert_ids_BTA.shape[-1], buffer_factor,
                receive_factor, axes,
            )  # fmt: skip
            run = functools.partial(levels.routed_experts, setup, level)
            options = {"slices": slices}
        out, stats = _on_rows(
            run, x_BTL, expert_ids_BTA, weights_BTA, weights, expert_fn, num_experts, **options
        )
        return out, _over_devices(jax.tree.map(lax.stop_gradient, stats), axes)

    rows = P(BATCH_AXES)
    return jax.shard_map(
        per_device,
        in_specs=(rows, rows, rows, layouts, P()),
        out_specs=(rows, P()),
        check_vma=False,
    )(x_BTL, expert_ids_BTA, weights_BTA, weights, copies and copies.sources_K)


def _ready(weights, dtype, prepare: Callable | None):
    """Weights of all experts, as `expert_fn` takes them."""
    weights = jax.tree.map(lambda w: w.astype(dtype) if _is_float(w) else w, weights)
    return prepare(weights) if prepare else weights


def _is_float(weight: jax.Array) -> bool:
    """False for packed codes and their scales, which are bits."""
    return jnp.issubdtype(weight.dtype, jnp.inexact)


def _shared(weights, weight_axes):
    """Which leaves have no dim of experts."""
    if weight_axes is None:
        return jax.tree.map(lambda _: False, weights)
    return jax.tree.map(lambda _, axes: axes[0] != "experts", weights, weight_axes)


def _layouts(weights, weight_axes, axis: str | None, sizes: dict[str, int]):
    """PartitionSpecs in which a device is given the weights."""
    if weight_axes is None:
        return jax.tree.map(lambda _: P(axis), weights)
    return jax.tree.map(lambda w, axes: stored_layout(axes, w.shape, sizes), weights, weight_axes)


def _gather(
    weight: jax.Array, layout: P, *, but: str | None, dtype, one, platform: str
) -> jax.Array:
    """The device's experts in `dtype`, whole in every axis of their layout except `but`.

    A compiler may turn or round the weights of all layers at once, before the first, and hold both.
    So the layer's own shards are held to the order of their dims, and rounded behind a factor
    (`one`, 1) that only this layer's tokens can tell.
    """
    order = tuple(range(weight.ndim))
    if platform == "tpu" and not _is_float(weight) and weight.ndim == 4:
        # TPUs tile bytes by at least four rows: two (gate and up) next to the last dim would be
        # padded to twice the size.
        order = (0, 2, 1, 3)
    weight = with_layout_constraint(weight, Layout(order))
    if _is_float(weight) and weight.dtype != dtype:
        weight = (weight * one.astype(weight.dtype)).astype(dtype)
    return gathered(weight, layout, but=but)


def _over_devices(stats: local.ExchangeStats, axes: tuple[str, ...]) -> local.ExchangeStats:
    """The most rounds, the mean of the rest."""
    mean = jax.tree.map(lambda s: lax.pmean(s, axes), stats)
    return mean._replace(rounds=lax.pmax(stats.rounds, axes))


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
