"""Optimised HLO text as instructions, and how often each one runs in a step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


class Instruction(NamedTuple):
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str  # what stands in the brackets, a constant's value
    attributes: str


Body = dict[str, Instruction]  # a computation's instructions by name


_INSTRUCTION = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\)\s*->\s*.*\{\s*$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")


def parse_computations(hlo: str) -> tuple[dict[str, Body], str]:
    """Instructions of every computation by name, and the name of the entry computation."""
    computations: dict[str, Body] = {}
    entry = ""
    body: Body | None = None
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


def _instruction(line: str) -> Instruction | None:
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
    return Instruction(name, rest[:end], opcode.group(1), operands, inside, rest[close + 1 :])


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


def walk(
    computations: dict[str, Body], name: str, times: int, is_open: bool
) -> Iterator[tuple[Instruction, Body, int, bool]]:
    """(collective, where it stands, how often it runs, whether in a loop of unknown length)."""
    body = computations.get(name, {})
    for found in body.values():
        if found.opcode == "send" or found.opcode.removesuffix("-start") in KINDS:
            yield found, body, times, is_open
            continue
        if found.opcode.endswith(("-done", "-update")) or continues_collective(found):
            continue
        count: int | None = 1
        if found.opcode == "while":
            count = trips(computations, body, found)
        for inner in called_by(found):
            yield from walk(computations, inner, times * (count or 1), is_open or count is None)


def begins_collective(found: Instruction) -> bool:
    """Whether something goes on the wire here and comes in at an instruction further down.

    A pair of instructions; on a TPU also a fusion of the name `async-collective-start`. Pairs with
    nothing between them XLA marks as synchronous.
    """
    pair = found.opcode.endswith("-start") or found.opcode == "send"
    fused = found.opcode == "fusion" and found.name.startswith("async-collective-start")
    return fused or (pair and '"is_sync":true' not in found.attributes)


def continues_collective(found: Instruction) -> bool:
    """Whether a TPU's fusion takes a collective on its way, or ends it, that began further up.

    The collective stands in the fused computation again.
    """
    if found.opcode != "fusion":
        return False
    named = any(name.startswith("async_collective_fusion") for name in called_by(found))
    return named or found.name.startswith("async-collective-done")


def called_by(found: Instruction) -> list[str]:
    """Computations that an instruction runs: a fusion's, a loop's, a branch's."""
    called = _CALLED.findall(found.attributes)
    for branches in _BRANCHES.findall(found.attributes):
        called += re.findall(r"[\w.\-]+", branches)
    return called


def trips(computations: dict[str, Body], body: Body, loop: Instruction) -> int | None:
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


def _constant(body: Body, name: str) -> int | None:
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
