"""Collectives of a compiled program, counted from its optimised HLO text.

Every computation that runs is walked from the entry; a loop's body counts as often as the compiler
knows that it runs. Loops whose length only the data decides (further rounds of an exchange) are
kept apart: their collectives are listed once and enter no total.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


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
    link_bytes: int = 0
    network_bytes: int = 0


class _Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands in the brackets, a constant's value
    attributes: str


_Body = dict[str, _Instruction]  # a computation's instructions by name


def count_collectives(hlo: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """Collectives of a program, grouped by kind and mesh axes, most sent bytes first.

    Args:
      hlo: `compiled.as_text()`.
      mesh_shape: axis -> size, in the order of the mesh the program was compiled for.
    """
    computations, entry = parse_computations(hlo)
    totals: dict[tuple[str, str, int, bool], list[int]] = {}
    for found, body, times, is_open in _walk(computations, entry, 1, False):
        kind = found.opcode.removesuffix("-start")
        axes, group = _axes_of(found.attributes, kind, mesh_shape)
        if group == 1:
            continue  # nothing moves
        operand = _operand_bytes(found, body)
        slot = totals.setdefault((kind, axes, group, is_open), [0, 0, 0])
        slot[0] += times
        slot[1] += times * operand
        slot[2] += times * _sent(kind, operand, group)
    rows = [
        Collective(kind, axes, group, count, operand_bytes, sent_bytes, is_open)
        for (kind, axes, group, is_open), (count, operand_bytes, sent_bytes) in totals.items()
    ]
    return sorted(rows, key=lambda row: (row.open_loop, -row.sent_bytes, row.kind, row.axes))


_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def parse_computations(hlo: str) -> tuple[dict[str, _Body], str]:
    """Instructions of every computation by name, and the name of the entry computation."""
    computations: dict[str, _Body] = {}
    entry = ""
    body: _Body | None = None
    for line in hlo.splitlines():
        if body is None or line[:1] not in (" ", "}", "\t"):
            header = _HEADER.match(line)
            if header:
                body = computations.setdefault(header.group(2), {})
                entry = header.group(2) if header.group(1) else entry
            continue
        if line.startswith("}"):
            body = None
            continue
        found = _instruction(line)
        if found:
            body[found.name] = found
    return computations, entry or next(reversed(computations), "")


def _instruction(line: str) -> _Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    name, rest = match.groups()
    end = _closing(rest, 0) + 1 if rest.startswith("(") else len(rest.split(" ", 1)[0])
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    inside = rest[opcode.end() : close]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return _Instruction(name, rest[:end], opcode.group(1), operands, inside, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Place of the bracket that closes the one at `start`."""
    depth = 0
    for match in re.finditer(r"[()]", text[start:]):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return start + match.start()
    return len(text)


_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')


def _walk(
    computations: dict[str, _Body], name: str, times: int, is_open: bool
) -> Iterator[tuple[_Instruction, _Body, int, bool]]:
    """(collective, where it stands, how often it runs, whether in a loop of unknown length)."""
    body = computations.get(name, {})
    for found in body.values():
        if found.opcode.removesuffix("-start") in KINDS:
            yield found, body, times, is_open
            continue
        if found.opcode.endswith(("-done", "-update")):
            continue
        inner_times, inner_open = times, is_open
        if found.opcode == "while":
            trips = _trips(computations, body, found)
            inner_times = times if trips is None else times * trips
            inner_open = is_open or trips is None
        called = _CALLED.findall(found.attributes)
        for branches in _BRANCHES.findall(found.attributes):
            called += re.findall(r"[\w.\-]+", branches)
        for inner in called:
            yield from _walk(computations, inner, inner_times, inner_open)


def _trips(computations: dict[str, _Body], body: _Body, loop: _Instruction) -> int | None:
    """How often a loop runs: as the compiler says, or from its counter; None = the data decides.

    The TPU compiler does not say. JAX's counted loops go in steps of 1 up to a constant.
    """
    said = _TRIPS.search(loop.attributes)
    if said:
        return int(said.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    inner = computations.get(condition.group(1), {}) if condition else {}
    test = next(reversed(inner.values()), None)
    if test is None or test.opcode != "compare" or "direction=LT" not in test.attributes:
        return None
    counter, end = inner.get(test.operands[0]), _constant(inner, test.operands[1])
    place = re.search(r"index=(\d+)", counter.attributes) if counter else None
    begin = body.get(loop.operands[0]) if loop.operands else None
    if end is None or place is None or begin is None or begin.opcode != "tuple":
        return None
    start = _constant(body, begin.operands[int(place.group(1))])
    return None if start is None else max(end - start, 0)


def _constant(body: _Body, name: str) -> int | None:
    """The integer that a name stands for, through copies."""
    found = body.get(name)
    while found is not None and found.opcode in ("copy", "bitcast") and found.operands:
        found = body.get(found.operands[0])
    if found is None or found.opcode != "constant" or not re.fullmatch(r"-?\d+", found.literal):
        return None
    return int(found.literal)


def type_bytes(text: str) -> int:
    """Bytes of an HLO type: of all arrays in it, layouts ignored."""
    total = 0
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<= ]*)\]", text):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits.group()) if digits else 8)
        sizes = [int(d.strip(" <=")) for d in dims.split(",") if d.strip()]
        total += math.prod(sizes) * bits // 8
    return total


def _operand_bytes(found: _Instruction, body: _Body) -> int:
    names = found.operands[:1] if found.opcode.startswith("ragged") else found.operands
    return sum(type_bytes(body[name].type) for name in names if name in body)


def _sent(kind: str, operand: int, group: int) -> int:
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


def _axes_of(attributes: str, kind: str, mesh_shape: Mapping[str, int]) -> tuple[str, int]:
    """Mesh axes that a collective spans, and the devices in a group."""
    if kind == "collective-permute":
        pairs = _braced(attributes, "source_target_pairs")
        moved = [pair for pair in pairs if len(set(pair)) > 1]
        return _names(moved, mesh_shape), 2 if moved else 1
    groups = replica_groups(attributes) or [list(range(math.prod(mesh_shape.values())))]
    return _names(groups, mesh_shape), len(groups[0])


def _names(groups: Sequence[Sequence[int]], mesh_shape: Mapping[str, int]) -> str:
    sizes = tuple(mesh_shape.values())
    used: set[int] = set()
    for group in groups:
        if max(group) >= math.prod(sizes):
            return "?"
        places = np.stack(np.unravel_index(np.asarray(group), sizes))
        used |= set(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return "*".join(name for i, name in enumerate(mesh_shape) if i in used) or "-"


def replica_groups(attributes: str) -> list[list[int]]:
    """Groups of devices, from `{{0,1},{2,3}}` or `[2,2]<=[4]` or `[2,2]<=[2,2]T(1,0)`."""
    compact = re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    )
    if not compact:
        return _braced(attributes, "replica_groups")
    rows, columns, dims, order = compact.groups()
    devices = np.arange(int(rows) * int(columns)).reshape([int(d) for d in dims.split(",")])
    if order:
        devices = devices.transpose([int(d) for d in order.split(",")])
    return devices.reshape(int(rows), int(columns)).tolist()


def _braced(attributes: str, field: str) -> list[list[int]]:
    match = re.search(rf"{field}=\{{(\{{[\d,{{}} ]*\}})?\}}", attributes)
    if not match or not match.group(1):
        return []
    inner = re.findall(r"\{([\d, ]*)\}", match.group(1))
    return [[int(n) for n in group.split(",")] for group in inner if group.strip()]
