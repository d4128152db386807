"""Swap Core: which results stay, which go to the host, which are computed again, under a budget.

All sets of names are tried. For each the layers' graphs tell what is left to compute and to send;
of each set that could be the best, every way to divide it between device and host. The step time
that is compared is that of what the choice changes: what is computed and sent again, and what of
the copies no compute hides. XLA fetches a repeat's results while the repeat behind it computes, but
awaits copies to the host at the end of their repeat, so those are counted in full. The answer is
the best there is for these figures, and the same whenever they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from moejax.memory.graph import Graph

MOST_NAMES = 18  # 2**18 sets


class Layer(NamedTuple):
    """Layers of one kind.

    Attributes:
      kind: in words.
      number: how many.
      forward: graph of the forward pass.
      backward: graph of the gradient, with the forward pass once more.
      group: so many stand in a row, and leave for the host together.
    """

    kind: str
    number: int
    forward: Graph
    backward: Graph
    group: int = 1


class Budget(NamedTuple):
    """What a device has for a step's results.

    Attributes:
      device_bytes: of its memory, beside what a step takes that keeps nothing.
      host_bytes: its share of the host's memory.
      flops: FLOP/s.
      host_bytes_s: copies to the host, and from it, while all devices of the host copy.
      link_bytes_s: what it receives from other devices.
    """

    device_bytes: float
    host_bytes: float
    flops: float
    host_bytes_s: float
    link_bytes_s: float


class Decision(NamedTuple):
    """What becomes of one result, and why; bytes and seconds of a device and microbatch.

    Attributes:
      name: of the result.
      layers: how many have it.
      size: bytes of all of them.
      copy_s: time of their copies to the host; they come back in as much.
      again_s: time to compute and send again what keeping it saves, the other choices as they are.
      flops: FLOPs of that.
      choice: keep, offload or recompute.
      reason: in words.
    """

    name: str
    layers: int
    size: float
    copy_s: float
    again_s: float
    flops: float
    choice: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """The best choice for all names.

    Attributes:
      decisions: for every name.
      kept_bytes, offloaded_bytes: of a device.
      spared_bytes: part of those kept that a step which keeps nothing holds too, at its peak: the
        results of the layer in work, computed again.
      staged_bytes: device memory that offloaded results pass through.
      flops: FLOPs computed again.
      flops_full: the same where nothing is kept.
      forward_s, backward_s: time of both passes, nothing computed again.
      again_s: time of what is computed and sent again.
      exposed_s: time of copies that no compute hides.
    """

    decisions: tuple[Decision, ...]
    kept_bytes: float
    spared_bytes: float
    offloaded_bytes: float
    staged_bytes: float
    flops: float
    flops_full: float
    forward_s: float
    backward_s: float
    again_s: float
    exposed_s: float

    @property
    def device_bytes(self) -> float:
        """What the choice adds to a step that keeps nothing."""
        return self.kept_bytes - self.spared_bytes + self.staged_bytes

    @property
    def saved_share(self) -> float:
        """Share of the FLOPs of full recomputation that is saved."""
        return 1 - self.flops / self.flops_full if self.flops_full else 0.0

    def names(self, choice: str) -> tuple[str, ...]:
        """Names with this choice."""
        return tuple(one.name for one in self.decisions if one.choice == choice)


class Tables(NamedTuple):
    """Figures of every set of names; bit i of a set is name i.

    Attributes:
      names: in the order of the bits.
      flops, sent: what is computed, and received, again [sets].
      held: bytes of each name that are held [names, sets].
      spared: the same of one layer alone, of the kind with the most bytes of names [names, sets].
      staged: bytes of each name on the device if it is offloaded: of a group in use, of one on its
        way, and of a layer [names].
      layers: layers that have each name [names].
    """

    names: tuple[str, ...]
    flops: np.ndarray
    sent: np.ndarray
    held: np.ndarray
    spared: np.ndarray
    staged: np.ndarray
    layers: np.ndarray


def tabulate(layers: Sequence[Layer]) -> Tables:
    """What every set of kept names leaves to do.

    Raises:
      ValueError: more names than sets can be tried of.
    """
    names = tuple(dict.fromkeys(name for one in layers for name in one.backward.names()))
    if len(names) > MOST_NAMES:
        raise ValueError(f"{len(names)} names are too many to try all sets; {MOST_NAMES} are not.")
    sets = 1 << len(names)
    out = Tables(
        names, np.zeros(sets), np.zeros(sets), np.zeros((len(names), sets)),
        np.zeros((len(names), sets)), np.zeros(len(names)), np.zeros(len(names), int),
    )  # fmt: skip
    most = 0.0
    for layer in layers:
        own, size = _add(out, layer)
        if size > most:
            out.spared[:], most = own, size
    return out


def _add(out: Tables, layer: Layer) -> tuple[np.ndarray, float]:
    """Adds one kind of layers: goes backwards through its graph, for all sets at once.

    Returns:
      What one of them holds of each name [names, sets], and the bytes of all its names.
    """
    sets, place = len(out.flops), {name: i for i, name in enumerate(out.names)}
    kept = [(np.arange(sets) >> i & 1).astype(bool) for i in range(len(place))]
    nodes, needed = layer.backward.nodes, layer.backward.needed()
    wanted = {i: np.ones(sets, bool) for n in needed if nodes[n].after for i in nodes[n].inputs}
    sizes, own = np.zeros(len(place)), np.zeros_like(out.held)
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        want = wanted.pop(number, None)
        if want is None or node.after:
            continue
        if node.name:
            i = place[node.name]
            own[i] += node.size * (want & kept[i])
            sizes[i] += node.size
            want = want & ~kept[i]
        out.flops[:] += layer.number * node.flops * want
        out.sent[:] += layer.number * node.sent * want
        for below in node.inputs:
            wanted[below] = wanted[below] | want if below in wanted else want
    out.held[:] += layer.number * own
    out.staged[:] = np.maximum(out.staged, sizes * (2 * layer.group + 1))
    out.layers[:] += layer.number * (sizes > 0)
    return own, float(sizes.sum())


def choose(layers: Sequence[Layer], budget: Budget) -> Plan:
    """The choice with the least step time; of equals the one with the least memory.

    Raises:
      ValueError: not even nothing fits: the budget is below 0.
    """
    if budget.device_bytes < 0:
        raise ValueError(f"the budget is {-budget.device_bytes:.0f} bytes short of any policy.")
    table = tabulate(layers)
    forward_s, backward_s = passes(layers, budget)
    again_s = table.flops / budget.flops + table.sent / budget.link_bytes_s
    best: tuple | None = None
    for number in np.lexsort((np.arange(len(again_s)), again_s)):
        if best is not None and again_s[number] > best[0]:
            break
        found = _divided(table, int(number), budget, backward_s + again_s[number])
        if found is not None:
            exposed, device, host, off = found
            key = (float(again_s[number]) + exposed, device + host, host, int(number), off)
            best = key if best is None or key < best else best
    assert best is not None  # the empty set fits
    return plan_of(layers, table, budget, best[3], best[4])


def _divided(
    table: Tables, number: int, budget: Budget, backward_s: float
) -> tuple[float, float, float, int] | None:
    """The best division of a set between device and host.

    Returns:
      Exposed time, bytes on the device and on the host, and the set on the host. None where no
      division fits, or where a name of the set holds nothing (a smaller set is the same).
    """
    bits = [i for i in range(len(table.names)) if number >> i & 1]
    held = table.held[bits, number]
    if (held == 0).any():
        return None
    places = np.zeros(1, int)
    host, device = np.zeros(1), np.zeros(1)
    for i, size in zip(bits, held, strict=True):
        places = np.concatenate([places, places | 1 << i])
        host = np.concatenate([host, host + size])
        stays = device + size - table.spared[i, number]
        device = np.concatenate([stays, device + table.staged[i]])
    fits = (device <= budget.device_bytes) & (host <= budget.host_bytes)
    if not fits.any():
        return None
    copy_s = host / budget.host_bytes_s
    exposed = copy_s + np.maximum(copy_s - backward_s, 0)
    order = np.lexsort((places, host, np.where(fits, exposed, np.inf)))
    first = order[0]
    return float(exposed[first]), float(device[first]), float(host[first]), int(places[first])


def passes(layers: Sequence[Layer], budget: Budget) -> tuple[float, float]:
    """Seconds of the forward and the backward pass of all layers, nothing computed again."""
    forward = sum(one.number * one.forward.flops for one in layers)
    backward = sum(one.number * one.backward.backward_flops() for one in layers)
    return forward / budget.flops, backward / budget.flops


def plan_for(
    layers: Sequence[Layer], budget: Budget, choices: Mapping[str, str]
) -> Plan:  # fmt: skip
    """What a given choice would cost, keep, offload or recompute by name."""
    table = tabulate(layers)
    held = sum(1 << i for i, n in enumerate(table.names) if choices.get(n) in ("keep", "offload"))
    off = sum(1 << i for i, n in enumerate(table.names) if choices.get(n) == "offload")
    return plan_of(layers, table, budget, held, off)


def plan_of(layers: Sequence[Layer], table: Tables, budget: Budget, held: int, off: int) -> Plan:
    """The plan that keeps the set `held`, of which `off` on the host."""
    forward_s, backward_s = passes(layers, budget)
    again_s = table.flops / budget.flops + table.sent / budget.link_bytes_s
    on_host = np.array([off >> i & 1 for i in range(len(table.names))], bool)
    host = float(table.held[on_host, held].sum())
    kept = float(table.held[:, held].sum()) - host
    spared = float(table.spared[~on_host, held].sum())
    staged = float(table.staged[on_host].sum())
    copy_s = host / budget.host_bytes_s
    exposed = copy_s + max(copy_s - backward_s - float(again_s[held]), 0.0)
    left = budget.device_bytes - kept + spared - staged
    rows = [_decision(table, budget, again_s, i, held, off, left) for i in range(len(table.names))]
    return Plan(
        tuple(rows), kept, spared, host, staged, float(table.flops[held]), float(table.flops[0]),
        forward_s, backward_s, float(again_s[held]), exposed,
    )  # fmt: skip


def _decision(
    table: Tables, budget: Budget, again_s: np.ndarray, i: int, held: int, off: int, left: float
) -> Decision:
    """What became of name i, and why."""
    without, with_it = held & ~(1 << i), held | 1 << i
    size = float(table.held[i, with_it])
    saves = float(again_s[without] - again_s[with_it])
    flops = float(table.flops[without] - table.flops[with_it])
    copy_s = size / budget.host_bytes_s
    if off >> i & 1:
        choice = "offload"
        reason = "no room on the device; its copy takes less than computing it again"
    elif held >> i & 1:
        choice, reason = "keep", "hot: fits, and saves its recomputation"
    elif size == 0 or saves <= 0:
        choice, reason = "recompute", "nothing left that needs it" if size == 0 else "saves nothing"
    elif (needs := size - float(table.spared[i, with_it])) > left:
        choice, reason = "recompute", f"{needs - left:.3g} bytes more than are left"
        if copy_s > saves:
            reason += "; cheaper to compute than to copy"
    else:
        choice, reason = "recompute", "another set with less memory is as fast"
    return Decision(
        table.names[i], int(table.layers[i]), size, copy_s, saves, flops, choice, reason
    )  # fmt: skip
