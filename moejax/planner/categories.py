"""What the arguments of a step are: parameters by what happens to them, optimizer state, batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax

from moejax.layers.adapter import is_adapter
from moejax.models.parts import flat_infos, num_values
from moejax.train.state import Program

ON_HOST = ", on the host"  # ends the names of categories that lie in host memory


class Category(NamedTuple):
    """One kind of argument: numbers in the whole of it, and bytes on a device (or its host)."""

    name: str
    values: int
    device_bytes: int


def argument_categories(program: Program, batch: dict[str, Any]) -> list[Category]:
    """The arguments of a program's step by category, largest share of a device first.

    Args:
      program: static parts of the run.
      batch: the batch's ShapeDtypeStructs with shardings.
    """
    found: dict[str, list[int]] = {}

    def add(name: str, values: int, leaf: Any, where: jax.sharding.Sharding) -> None:
        entry = found.setdefault(name, [0, 0])
        entry[0] += values
        entry[1] += math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    infos, trains = flat_infos(program.parts.infos), jax.tree.leaves(program.trains)
    for info, trained, (leaf, where, hosted) in zip(
        infos, trains, _leaves(program, "params"), strict=True
    ):
        add(_category(info.name, trained) + hosted * ON_HOST, num_values(info, leaf), leaf, where)
    for name, part in (("optimizer state", "opt_state"), ("balancing state", "balance")):
        for leaf, where, hosted in _leaves(program, part):
            add(name + hosted * ON_HOST, math.prod(leaf.shape), leaf, where)
    for leaf in jax.tree.leaves(batch):
        add("batch", math.prod(leaf.shape), leaf, leaf.sharding)
    rows = [Category(name, *sizes) for name, sizes in found.items()]
    return sorted(rows, key=lambda row: -row.device_bytes)


def _category(name: str, trained: bool) -> str:
    if is_adapter(name):
        return "adapters"
    part = "routed experts" if ".experts." in name else "other parameters"
    return f"{'trained' if trained else 'frozen'} {part}"


def _leaves(program: Program, part: str) -> Iterable[tuple[Any, Any, bool]]:
    """(leaf, sharding, whether it is in host memory) of a part of the state."""
    trees = (getattr(tree, part) for tree in (program.abstract, program.shardings, program.hosted))
    return zip(*map(jax.tree.leaves, trees), strict=True)
