"""The least time that a step can take on a chip: by arithmetic, by memory, by network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from moejax.models.parts import ModelParts, flat_infos, num_values
from moejax.planner.collectives import Collective
from moejax.planner.hardware import Chip

# Devices of an axis that share a host or slice: axis -> how many of its neighbours do.
Near = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of a step by what bounds it, each alone.

    Attributes:
      compute_s: arithmetic, what remat computes again included, at the data sheet's rate.
      hbm_s: memory traffic that cannot be avoided, at the data sheet's rate.
      link_s: bytes sent inside hosts or slices.
      network_s: bytes sent between them.
      step_s: the largest, as if all overlapped perfectly.
      serial_s: the sum, as if nothing did.
      mfu: the model's FLOPs over what the chips could do in `step_s`.
      serial_mfu: the same for `serial_s`.
      bound: name of the largest term.
    """

    compute_s: float
    hbm_s: float
    link_s: float
    network_s: float
    step_s: float
    serial_s: float
    mfu: float
    serial_mfu: float
    bound: str


def roofline(
    *,
    model_flops: float,
    hardware_flops: float,
    hbm_bytes: float,
    collectives: Iterable[Collective],
    chip: Chip,
    peak_flops: float,
) -> Roofline:
    """Terms of one device.

    Args:
      model_flops: FLOPs of its share of the step that the model's maths needs.
      hardware_flops: those that it carries out.
      hbm_bytes: bytes between its memory and its cores.
      collectives: what it sends, by link; those in loops of unknown length are left out.
      chip: memory and link rates.
      peak_flops: arithmetic rate.
    """
    closed = [row for row in collectives if not row.open_loop]
    terms = {
        "compute": hardware_flops / peak_flops,
        "hbm": hbm_bytes / chip.hbm_bytes_s,
        "link": sum(row.link_bytes for row in closed) / chip.link_bytes_s,
        "network": sum(row.network_bytes for row in closed) / chip.network_bytes_s,
    }
    least, most = max(terms.values()), sum(terms.values())
    return Roofline(
        terms["compute"], terms["hbm"], terms["link"], terms["network"], least, most,
        mfu=model_flops / peak_flops / least,
        serial_mfu=model_flops / peak_flops / most,
        bound=max(terms, key=lambda name: terms[name]),
    )  # fmt: skip


def with_links(row: Collective, near: Near) -> Collective:
    """The row with its bytes by link.

    Args:
      near: along each mesh axis, how many devices are on one host or slice.
    """
    link, network = split_bytes(row, near)
    return dataclasses.replace(row, link_bytes=round(link), network_bytes=round(network))


def wire_seconds(row: Collective, near: Near, chip: Chip) -> float:
    """Time of a row's bytes on the wire, first inside and then between hosts or slices."""
    link, network = split_bytes(row, near)
    return link / chip.link_bytes_s + network / chip.network_bytes_s


def split_bytes(row: Collective, near: Near) -> tuple[float, float]:
    """Bytes that a device sends over fast links, and over the network, for one table row.

    An all-to-all sends to every peer alike. A gather, scatter or reduction goes in two levels,
    where each device of a host takes its share of what must cross: (h - 1) / h of the whole over
    h hosts, divided by the devices of a host.
    """
    if row.between_slices:
        return 0.0, float(row.sent_bytes)
    inside = min(math.prod(near.get(axis, 1) for axis in row.axes.split("*")), row.group)
    if inside >= row.group:
        return float(row.sent_bytes), 0.0
    if row.kind == "collective-permute":
        return (float(row.sent_bytes), 0.0) if inside > 1 else (0.0, float(row.sent_bytes))
    if row.kind.endswith("all-to-all"):
        share = (row.group - inside) / (row.group - 1)
        return row.sent_bytes * (1 - share), row.sent_bytes * share
    hosts = row.group / inside
    whole = row.sent_bytes * row.group / (row.group - 1)
    across = whole * (hosts - 1) / hosts / inside
    return whole * (inside - 1) / inside, across


def hbm_bytes(
    parts: ModelParts, compute_dtype: str, expert_ways: int, remat: str, passes: int,
    state_bytes: int, temp_bytes: int,
) -> float:  # fmt: skip
    """Traffic of one device that no fusion avoids.

    State read and written once, weights in the compute dtype written and read in every pass
    (forward, again under remat, backward) of every microbatch, temporaries written and read once.

    Args:
      parts: the model.
      compute_dtype: of the weights at use.
      expert_ways: devices that share the experts.
      remat: policy.
      passes: microbatches.
      state_bytes: arguments and results.
      temp_bytes: temporaries.
    """
    weights = 0
    for info, leaf in zip(flat_infos(parts.infos), jax.tree.leaves(parts.params), strict=True):
        weights += num_values(info, leaf) // (expert_ways if "experts" in info.axes else 1)
    rounds = (2 if remat == "none" else 3) * passes
    at_use = weights * jnp.dtype(compute_dtype).itemsize * rounds
    return state_bytes + 2.0 * at_use + 2.0 * temp_bytes
