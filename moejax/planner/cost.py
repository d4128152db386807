"""What an HLO instruction costs alone: FLOPs of its matrix products, bytes to and from memory."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from moejax.planner.hlo import Body, Instruction, called_by, trips, type_bytes


class Cost(NamedTuple):
    """FLOPs and memory bytes."""

    flops: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> Cost:
        return Cost(self.flops * count, self.bytes * count)


_NOTHING = Cost(0.0, 0.0)
# Names for what is there already, and the ends of what began before.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency partition-id "
    "replica-id opt-barrier optimization-barrier domain iota".split()
)
_SLICES = ("dynamic-slice", "slice", "gather")


def dims_of(text: str) -> list[int]:
    """Dims of the first array in an HLO type."""
    match = re.search(r"\[([\d,<= ]*)\]", text)
    sizes = match.group(1).split(",") if match else []
    return [int(size.strip(" <=")) for size in sizes if size.strip()]


def product_flops(found: Instruction, body: Body) -> float:
    """FLOPs of a dot, of a convolution (the TPU's form of one), of a call to cuBLAS; else 0."""
    if found.opcode == "custom-call" and "gemm" not in found.attributes:
        return 0.0
    if found.opcode not in ("dot", "convolution", "custom-call") or len(found.operands) < 2:
        return 0.0
    sides = [body[name].type for name in found.operands[:2] if name in body]
    if len(sides) < 2:
        return 0.0
    left, right, out = dims_of(sides[0]), dims_of(sides[1]), dims_of(found.type)
    count = 2.0 * math.prod(out)
    if found.opcode == "dot":
        summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", found.attributes)
        places = [int(d) for d in summed.group(1).split(",") if d] if summed else []
        return count * math.prod(left[place] for place in places)
    labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", found.attributes)
    if labels is None:  # cuBLAS: [M, K] and [K, N] give [M, N]
        return count * math.sqrt(math.prod(left) * math.prod(right) / max(math.prod(out), 1))
    summed_sizes = 1
    for label, size in zip(labels.group(1), right, strict=False):
        # A spatial dim that the result has whole is a batch of products.
        batch = label.isdigit() and out[labels.group(2).index(label)] == size
        summed_sizes *= 1 if label == "o" or batch else size
    return count * summed_sizes


def cost(found: Instruction, body: Body, computations: dict[str, Body]) -> Cost:
    """One run of an instruction, with all that it calls; collectives and what is free cost 0."""
    opcode = found.opcode
    if opcode in FREE or opcode.endswith(("-start", "-done", "-update")):
        return _NOTHING
    if opcode in ("while", "conditional", "call"):
        inner = [computation_cost(name, computations) for name in called_by(found)]
        if opcode == "while":
            count = trips(computations, body, found)
            return sum(inner, _NOTHING).times(1 if count is None else count)
        return max(inner, default=_NOTHING)
    if opcode == "fusion":
        names = called_by(found)
        fused = computations.get(names[0], {}) if names else {}
        flops = sum(product_flops(one, fused) for one in fused.values())
        return Cost(flops, _fused_bytes(fused, found, body))
    operands = sum(type_bytes(body[name].type) for name in found.operands if name in body)
    if opcode in _SLICES:
        operands = type_bytes(found.type)
    if opcode == "dynamic-update-slice":
        return Cost(0.0, 2.0 * type_bytes(body[found.operands[1]].type))
    return Cost(product_flops(found, body), operands + type_bytes(found.type))


def computation_cost(name: str, computations: dict[str, Body]) -> Cost:
    """Sum over a computation's instructions."""
    body = computations.get(name, {})
    return sum((cost(one, body, computations) for one in body.values()), _NOTHING)


def _fused_bytes(fused: Body, found: Instruction, body: Body) -> float:
    """Traffic of a fusion: of an operand only sliced in it the slices, of an update the update."""
    users: dict[str, list[Instruction]] = {}
    for one in fused.values():
        for name in one.operands:
            users.setdefault(name, []).append(one)
    total = 0.0
    updated = 0
    for one in fused.values():
        if one.opcode == "dynamic-update-slice":
            target = fused.get(one.operands[0])
            if target is not None and target.opcode in ("parameter", "bitcast"):
                updated += type_bytes(one.type) - type_bytes(fused[one.operands[1]].type)
        if one.opcode != "parameter":
            continue
        uses = users.get(one.name, [])
        whole = type_bytes(one.type)
        if uses and all(use.opcode in _SLICES for use in uses):
            whole = min(whole, sum(type_bytes(use.type) for use in uses))
        elif uses and all(
            use.opcode == "dynamic-update-slice" and use.operands[0] == one.name for use in uses
        ):
            whole = 0
        total += whole
    return total + max(type_bytes(found.type) - updated, 0)
