"""The list of adapters for people: printed when a run starts, and a file in its folder."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from moejax.lora.select import Target

ADAPTERS_FILE = "adapters.json"


class AdapterRow(NamedTuple):
    """Adapters of one kind: the map's last word, its kind, how many, shapes, parameters."""

    module: str
    kind: str
    layers: int
    a: str
    b: str
    parameters: int


def num_parameters(target: Target, *, shared_a: bool = False) -> int:
    """Trained numbers of one adapter."""
    one, experts = target.map, max(target.map.num_experts, 1)
    a = one.in_size * (1 if shared_a and one.num_experts else experts)
    return target.rank * (a + one.out_size * experts)


def adapter_rows(targets: Sequence[Target], *, shared_a: bool = False) -> list[AdapterRow]:
    """One row for each kind, size and rank of adapted map, in the order of first layers."""
    groups: dict[tuple, list[Target]] = {}
    for target in targets:
        m = target.map
        key = (m.adapter, m.kind, m.in_size, m.out_size, m.num_experts, target.rank)
        groups.setdefault(key, []).append(target)
    rows = []
    for (adapter, kind, in_size, out_size, experts, rank), members in groups.items():
        lead = f"{experts} x " if experts else ""
        a_lead = "" if shared_a else lead
        total = sum(num_parameters(t, shared_a=shared_a) for t in members)
        shapes = f"{a_lead}{in_size} x {rank}", f"{lead}{rank} x {out_size}"
        rows.append(AdapterRow(adapter, kind, len(members), *shapes, total))
    return rows


def write_adapters(
    workdir: pathlib.Path, targets: Sequence[Target], *, shared_a: bool = False
) -> pathlib.Path:
    """Writes `adapters.json`: every adapted map by its published name."""
    listed: list[dict[str, Any]] = [
        {
            "module": t.map.name, "kind": t.map.kind, "layer": t.map.layer, "rank": t.rank,
            "scale": t.scale, "in": t.map.in_size, "out": t.map.out_size,
            "experts": t.map.num_experts, "parameters": num_parameters(t, shared_a=shared_a),
        }
        for t in targets
    ]  # fmt: skip
    total = sum(entry["parameters"] for entry in listed)
    path, scratch = workdir / ADAPTERS_FILE, workdir / (ADAPTERS_FILE + ".tmp")
    text = json.dumps({"parameters": total, "adapters": listed}, indent=1)
    scratch.write_text(text + "\n", encoding="utf-8")
    os.replace(scratch, path)
    return path
