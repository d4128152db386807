"""Collectives of a compiled program, counted from its optimised HLO text.

Every computation that runs is walked from the entry; a loop's body counts as often as the compiler
knows that it runs. Loops whose length only the data decides (further rounds of an exchange) are
kept apart: their collectives are listed once and enter no total.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from moejax.planner.hlo import KINDS, Body, Instruction, parse_computations, type_bytes, walk


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same mesh axes.

    Attributes:
      kind: one of `KINDS`.
      axes: mesh axes along which a group's devices differ, as `fsdp*expert`.
      group: devices in a group.
      count: how often it runs in a step.
      operand_bytes: bytes that a device puts in, summed over the runs. Of a ragged all-to-all the
        whole send buffer, which is a bound.
      sent_bytes: bytes that a device must send to others.
      open_loop: it stands in a loop of unknown length and is counted for one pass.
      between_slices: TPU slices exchange it over the data centre's network, and nothing of it goes
        inside a slice.
      link_bytes, network_bytes: of the sent bytes those inside a host or slice, and those between
        them, each as the roofline takes them.
    """

    kind: str
    axes: str
    group: int
    count: int
    operand_bytes: int
    sent_bytes: int
    open_loop: bool = False
    between_slices: bool = False
    link_bytes: int = 0
    network_bytes: int = 0


def count_collectives(
    hlo: str, mesh_shape: Mapping[str, int], device_ids: Sequence[int] = ()
) -> list[Collective]:
    """Collectives of a program, grouped by kind and mesh axes, most sent bytes first.

    Args:
      hlo: `compiled.as_text()`.
      mesh_shape: axis -> size, in the order of the mesh the program was compiled for.
      device_ids: ids of the mesh's devices in its order; needed only for several TPU slices.
    """
    computations, entry = parse_computations(hlo)
    read = collective_reader(mesh_shape, device_ids)
    totals: dict[tuple[str, str, int, bool, bool], list[int]] = {}
    for found, body, times, is_open in walk(computations, entry, 1, False):
        one = read(found, body)
        if one is None:
            continue
        key = (one.kind, one.axes, one.group, is_open, one.between_slices)
        slot = totals.setdefault(key, [0, 0, 0])
        slot[0] += times
        slot[1] += times * one.operand_bytes
        slot[2] += times * one.sent_bytes
    rows = [
        Collective(kind, axes, group, count, operand_bytes, sent_bytes, is_open, across)
        for (kind, axes, group, is_open, across), (count, operand_bytes, sent_bytes) in (
            totals.items()
        )
    ]
    return sorted(rows, key=lambda row: (row.open_loop, -row.sent_bytes, row.kind, row.axes))


Reader = Callable[[Instruction, Body], Collective | None]


def collective_reader(mesh_shape: Mapping[str, int], device_ids: Sequence[int] = ()) -> Reader:
    """What one run of an instruction sends; None where it is no collective, or nothing moves.

    Args: as of :func:`count_collectives`.
    """
    places = _first_slice(device_ids) or range(math.prod(mesh_shape.values()))

    def read(found: Instruction, body: Body) -> Collective | None:
        kind, across = found.opcode.removesuffix("-start"), found.opcode == "send"
        if across:
            kind, groups = _between_slices(found.attributes, device_ids)
            axes, group = _names(groups, mesh_shape), len(groups[0]) if groups else 1
            operand = type_bytes(body[found.operands[0]].type) if groups else 0
        elif kind in KINDS:
            axes, group = _axes_of(found.attributes, kind, mesh_shape, places)
            operand = _operand_bytes(found, body)
        else:
            return None
        if group == 1:
            return None
        sent = sent_bytes(kind, operand, group)
        return Collective(kind, axes, group, 1, operand, sent, between_slices=across)

    return read


_SLICE = 100_000  # device 3 of the second slice has the id 200003


def _first_slice(device_ids: Sequence[int]) -> list[int]:
    """Places in the mesh of the first slice's devices: groups of a collective count them alone."""
    slices = [number // _SLICE for number in device_ids]
    return [place for place, number in enumerate(slices) if number == min(slices)]


def _between_slices(attributes: str, device_ids: Sequence[int]) -> tuple[str, list[list[int]]]:
    """Kind and groups (places in the mesh) of what a `send` gives to the runtime of slices.

    Of a ragged all-to-all only the rows count, not the sizes and offsets that go along. No group
    for a `send` of another sort.
    """
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    part = re.search(r'_xla_megascale_ragged_operand_index="(\d+)"', attributes)
    if kind is None or (part is not None and part.group(1) != "0"):
        return "", []
    ids = _braced(attributes, "_xla_megascale_target")
    every = re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+):(\d+)\}"', attributes)
    if every is not None:
        slices, first, last = every.groups()
        ids = [
            [_SLICE * int(number) + device for number in slices.split(",")]
            for device in range(int(first), int(last) + 1)
        ]
    places = {device: place for place, device in enumerate(device_ids)}
    known = [[places[one] for one in group] for group in ids if all(one in places for one in group)]
    return kind.group(1).lower().replace("_", "-"), known


def _operand_bytes(found: Instruction, body: Body) -> int:
    names = found.operands[:1] if found.opcode.startswith("ragged") else found.operands
    return sum(type_bytes(body[name].type) for name in names if name in body)


def sent_bytes(kind: str, operand: int, group: int) -> int:
    """Bytes that a device sends at least, by the usual ring or direct algorithm."""
    if group <= 1:
        return 0
    factor = {
        "all-gather": group - 1,
        "all-reduce": 2 * (group - 1) / group,
        "collective-permute": 1,
        "collective-broadcast": 1,
    }.get(kind, (group - 1) / group)
    return round(operand * factor)


def _axes_of(
    attributes: str, kind: str, mesh_shape: Mapping[str, int], places: Sequence[int]
) -> tuple[str, int]:
    """Mesh axes that a collective spans, and the devices in a group.

    Args:
      places: where in the mesh the devices lie that the collective numbers.
    """
    if kind == "collective-permute":
        pairs = _braced(attributes, "source_target_pairs")
        moved = [[places[one] for one in pair] for pair in pairs if len(set(pair)) > 1]
        return _names(moved, mesh_shape), 2 if moved else 1
    groups = replica_groups(attributes) or [list(range(len(places)))]
    if max(map(max, groups)) >= len(places):
        return "?", len(groups[0])
    return _names([[places[one] for one in group] for group in groups], mesh_shape), len(groups[0])


def _names(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> str:
    sizes = tuple(mesh_shape.values())
    used: set[int] = set()
    for group in groups:
        places = np.stack(np.unravel_index(np.asarray(group), sizes))
        used |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return "*".join(name for i, name in enumerate(mesh_shape) if i in used) or "-"


def replica_groups(attributes: str) -> list[list[int]]:
    """Groups of devices, in any of the forms that XLA prints.

    `{{0,1},{2,3}}`, `[2,2]<=[4]`, `[2,2]<=[2,2]T(1,0)`, or axes of a mesh of the compiler's own,
    `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}`; no groups where all are one.

    Raises:
      ValueError: groups in another form.
    """
    compact = re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if compact:
        rows, columns, dims, order = compact.groups()
        return _numbered(dims, order).reshape(int(rows), int(columns)).tolist()
    on_mesh = re.search(
        r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
        r"\s*\{([^}]*)\}",
        attributes,
    )
    if on_mesh:
        return _groups_on_mesh(*on_mesh.groups())
    if re.search(r"replica_groups=(?!\{)", attributes):
        raise ValueError(f"replica groups in an unknown form: {attributes[:200]}")
    return _braced(attributes, "replica_groups")


def _numbered(dims: str, order: str | None) -> np.ndarray:
    """0, 1, 2, ... in the shape `dims`, transposed."""
    shape = [int(d) for d in dims.split(",")]
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose([int(d) for d in order.split(",")]) if order else devices


def _groups_on_mesh(mesh: str, dims: str | None, order: str | None, axes: str) -> list[list[int]]:
    """Groups along `axes` of a mesh; `'a':(2)4` is the part of `a` of size 4 after one of 2."""
    sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", mesh)}
    count = str(math.prod(sizes.values()))
    devices = _numbered(dims or count, order).reshape(-1)
    asked = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", axes)
    parts: list[int] = []  # the mesh with every axis cut around the part that is asked for
    along = []
    for name, size in sizes.items():
        for before, part in [(b, p) for asked_name, b, p in asked if asked_name == name]:
            inside = int(part) if part else size
            outside = int(before) if before else 1
            parts += [outside, inside]
            along.append(len(parts) - 1)
            size //= outside * inside
        parts.append(size)
    grid = np.moveaxis(devices.reshape(parts), along, range(-len(along), 0))
    return grid.reshape(-1, math.prod(parts[i] for i in along)).tolist()


def _braced(attributes: str, field: str) -> list[list[int]]:
    match = re.search(rf"{field}=\{{(\{{[\d,{{}} ]*\}})?\}}", attributes)
    if not match or not match.group(1):
        return []
    inner = re.findall(r"\{([\d, ]*)\}", match.group(1))
    return [[int(n) for n in group.split(",")] for group in inner if group.strip()]
