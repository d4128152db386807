"""What a step sends, by arithmetic alone: rows to experts and back, weights gathered, gradients.

No compiler is asked, so these are the bytes that the plan of a step needs, with an even routing. A
compiler may gather a weight once more or once less, and moves small things that are left out here:
counts of rows, sums of metrics, copies of experts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import RunConfig
from moejax.models.parts import flat_infos
from moejax.partitioning.expert_exchange.api import resolve_exchange
from moejax.partitioning.expert_exchange.levels import even_copies
from moejax.partitioning.expert_exchange.padded import bucket_rows
from moejax.partitioning.rules import BATCH_AXES
from moejax.planner.collectives import Collective, sent_bytes
from moejax.planner.roofline import Near, with_links
from moejax.train.state import Program


class Hop(NamedTuple):
    """One leg of a token's way to its experts.

    Attributes:
      ranks: devices that a row may go to.
      rows: of a token on average, those that stay at home included.
      most: rows of a token that one device may get.
      between: whether it goes between hosts or inside them; None: to any device along `expert`.
    """

    ranks: int
    rows: float
    most: int
    between: bool | None = None


def exchange_hops(cfg: RunConfig, ranks: int) -> list[Hop]:
    """The legs of `model.moe.exchange_level` with an even routing.

    Args:
      cfg: one that knows its hosts (`RunConfig.with_hosts`).
      ranks: devices along `expert`.
    """
    moe = cfg.model.moe
    if moe.exchange_level == "expert":
        return [Hop(ranks, moe.top_k, moe.top_k)]
    per_device = even_copies(moe.num_experts, ranks, moe.top_k)
    hosts = moe.exchange_hosts
    if moe.exchange_level == "device" or hosts == ranks:
        return [Hop(ranks, per_device, 1)]
    per_host = even_copies(moe.num_experts, hosts, moe.top_k)
    return [Hop(hosts, per_host, 1, True), Hop(ranks // hosts, per_device, 1, False)]


def exchange_traffic(program: Program, near: Near, platform: str) -> list[Collective]:
    """What a device sends to experts and gets back from them in a step, forward and backward.

    Rows go there and back, once more where remat runs the layer again (`exchange` keeps what
    arrived), and their gradients the same ways. Of `ragged` the rows that there are, though its
    receive buffers are larger; of `padded` whole buckets.

    Args:
      program: of the run.
      near: along each mesh axis, how many devices share a host or slice.
      platform: of the devices.
    """
    cfg, ranks = program.cfg.with_hosts(), program.mesh.shape["expert"]
    moe, kind = cfg.model.moe, resolve_exchange(cfg.model.moe.exchange, ranks, platform)
    layers = len(program.parts.moe_layers())
    if kind == "local" or ranks == 1 or not layers:
        return []
    runs, forward = layers * cfg.train.accumulation, 2 if cfg.train.remat == "full" else 1
    width = (moe.latent_dim or cfg.model.dim) * jnp.dtype(cfg.train.compute_dtype).itemsize
    told = 0 if moe.exchange_level == "expert" else 8 * moe.top_k  # ids and weights go along
    tokens = tokens_of_device(program)
    slices = max(min(moe.exchange_slices, tokens), 1)
    in_slice = here = -(-tokens // slices)
    found = []
    for hop in exchange_hops(cfg, ranks):
        rows, row_bytes = hop.rows * tokens, (forward + 1) * (2 * width + told)
        if kind == "padded":
            even = in_slice * hop.rows / hop.ranks
            here = hop.ranks * bucket_rows(here * hop.most, even, moe.buffer_factor)
            rows = slices * here  # what a hop brings, filled or not, is what the next one sends on
            row_bytes += 4 * forward  # the expert's number, which has no gradient
        operand = runs * rows * row_bytes
        row = Collective(
            "all-to-all" if kind == "padded" else "ragged-all-to-all", "expert", hop.ranks,
            runs * (forward + 1) * 2, round(operand), round(operand * (hop.ranks - 1) / hop.ranks),
        )  # fmt: skip
        found.append(_on_its_link(row, hop, near, ranks))
    return found


def _on_its_link(row: Collective, hop: Hop, near: Near, ranks: int) -> Collective:
    if hop.between is None:
        return with_links(row, near)
    far = row.sent_bytes if hop.between and near["expert"] < ranks else 0
    return dataclasses.replace(row, link_bytes=row.sent_bytes - far, network_bytes=far)


def weight_traffic(program: Program, near: Near) -> list[Collective]:
    """What a device sends so that weights are whole where they are used, and their gradients apart.

    A layer's weights are gathered in each microbatch, and again where remat runs the layer again,
    in the type they are computed with (packed ones as they are). What is trained gives its gradient
    back by a reduce-scatter over the axes it is stored over and a sum over the other batch axes;
    what is frozen gives none.
    """
    cfg, sizes = program.cfg, dict(program.mesh.shape)
    totals: dict[tuple[str, str], list[int]] = {}

    def add(kind: str, axes: list[str], operand: int, count: int) -> None:
        wide = [axis for axis in axes if sizes[axis] > 1]
        if wide:
            entry = totals.setdefault((kind, "*".join(wide)), [0, 0])
            entry[0] += count
            entry[1] += operand

    leaves = (jax.tree.leaves(tree) for tree in (
        program.abstract.params, program.shardings.params, program.trains,
    ))  # fmt: skip
    for info, leaf, where, trained in zip(flat_infos(program.parts.infos), *leaves, strict=True):
        kept = ["expert"] if "experts" in info.axes else []
        stored = [axis for axis in _axes_of(where.spec) if axis not in kept]
        whole = math.prod(leaf.shape) * _bytes_at_use(leaf.dtype, cfg.train.compute_dtype)
        whole //= math.prod(sizes[axis] for axis in kept)
        ways = math.prod(sizes[axis] for axis in stored)
        again = 1 if cfg.train.remat == "none" or not info.stack else 2
        micro, layers = cfg.train.accumulation, math.prod(leaf.shape[: info.stack])
        add("all-gather", stored, micro * again * whole // ways, micro * again * layers)
        if trained:
            rest = [axis for axis in BATCH_AXES if axis not in (*stored, *kept)]
            add("reduce-scatter", stored, micro * whole, micro * layers)
            add("all-reduce", rest, micro * whole // ways, micro * layers)
    rows = []
    for (kind, axes), (count, operand) in totals.items():
        group = math.prod(sizes[axis] for axis in axes.split("*"))
        sent = sent_bytes(kind, operand, group)
        rows.append(with_links(Collective(kind, axes, group, count, operand, sent), near))
    return rows


def _axes_of(spec: Any) -> list[str]:
    """Mesh axes in a PartitionSpec."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return [axis for entry in entries for axis in entry]


def _bytes_at_use(stored: Any, compute: str) -> int:
    """Of one number: floats of 2 bytes and more are rounded before they travel."""
    size = jnp.dtype(stored).itemsize
    floats = jnp.issubdtype(stored, jnp.floating) and size > 1
    return jnp.dtype(compute).itemsize if floats else size


def tokens_of_device(program: Program) -> int:
    """Tokens of a device in one microbatch."""
    data, sizes = program.cfg.data, program.mesh.shape
    ways = math.prod(sizes[axis] for axis in BATCH_AXES) * program.cfg.train.accumulation
    return data.batch_size * data.seq_len // ways
