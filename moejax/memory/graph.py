"""What a backward pass computes again, as a graph: read from a jaxpr, cut where results are kept.

A layer's gradient under full rematerialisation holds its forward pass once more. Every value there
that no cotangent has gone into is computed again, unless what it is for is reached through a result
that was kept. So one trace tells, for every set of kept names, the FLOPs and sent bytes that are
left, and how much of each name is held.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Collectives bring their results over a link. A loop of unknown length that holds one is a round
# that follows only where a buffer was too small: it is counted as none.
_SENDS = ("all_to_all", "ragged_all_to_all", "all_gather", "psum", "reduce_scatter", "ppermute")
_WHOLE = ("scan", "while", "cond", "pallas_call")  # equations that stay one node
_SLICES = {"dynamic_slice": (0, None), "dynamic_update_slice": (0, 1)}


@dataclasses.dataclass
class Node:
    """One equation.

    Attributes:
      flops: of its matrix products, on one device.
      sent: bytes that it brings to a device over links.
      inputs: numbers of the nodes that it reads.
      name: tag of a result that may be kept, or "".
      size: bytes of that result on a device.
      after: whether a cotangent has gone into it: it belongs to the backward pass itself.
    """

    flops: float
    sent: float
    inputs: tuple[int, ...]
    name: str = ""
    size: float = 0.0
    after: bool = False


@dataclasses.dataclass
class Graph:
    """Equations in order, each after what it reads.

    Attributes:
      nodes: the equations, calls inlined.
      outputs: numbers of the nodes that give the results.
    """

    nodes: list[Node]
    outputs: list[int]

    @property
    def flops(self) -> float:
        """Of all that the results need."""
        return sum(self.nodes[i].flops for i in self.needed())

    def needed(self) -> set[int]:
        """Numbers of the nodes that the results need."""
        found, todo = set(), list(self.outputs)
        while todo:
            number = todo.pop()
            if number not in found:
                found.add(number)
                todo += self.nodes[number].inputs
        return found

    def backward_flops(self) -> float:
        """Of the backward pass itself, without anything computed again."""
        return sum(self.nodes[i].flops for i in self.needed() if self.nodes[i].after)

    def names(self) -> list[str]:
        """Tags that the results need, in their order."""
        tags = [self.nodes[i].name for i in sorted(self.needed())]
        return list(dict.fromkeys(tag for tag in tags if tag))


def read_graph(closed: ClosedJaxpr, cotangents: Sequence[int] = (), devices: int = 1) -> Graph:
    """The graph of a jaxpr.

    Args:
      closed: the jaxpr; shapes outside `shard_map` are those of all devices together.
      cotangents: which of its inputs are cotangents.
      devices: among how many the batch is split, where no shard_map has split it already.
    """
    reader = _Reader()
    jaxpr = closed.jaxpr
    env: dict[Any, _Value] = {}
    for place, var in enumerate(jaxpr.invars):
        env[var] = _Value(None, place in cotangents)
    outs = reader.read(jaxpr, env, 1.0 / devices)
    return Graph(reader.nodes, [v.node for v in outs if v.node is not None])


@dataclasses.dataclass(frozen=True)
class _Value:
    """Where a variable comes from; None for an input."""

    node: int | None
    after: bool


_INPUT = _Value(None, False)


class _Reader:
    def __init__(self):
        self.nodes: list[Node] = []

    def read(self, jaxpr: Jaxpr, env: dict[Any, _Value], share: float) -> list[_Value]:
        """Adds the equations of a jaxpr whose inputs are in `env`; gives its results."""

        def value(atom: Any) -> _Value:
            return _INPUT if isinstance(atom, Literal) else env.get(atom, _INPUT)

        for eqn in jaxpr.eqns:
            given = [value(atom) for atom in eqn.invars]
            inner = None if eqn.primitive.name in _WHOLE else called(eqn)
            if inner is not None:
                local = 1.0 if eqn.primitive.name == "shard_map" else share
                inner_env = dict(zip(inner.invars, given[-len(inner.invars) :], strict=True))
                results = self.read(inner, inner_env, local) if inner.invars else [_INPUT]
            else:
                results = [self._node(eqn, given, share)] * len(eqn.outvars)
            env.update(zip(eqn.outvars, results, strict=False))
        return [value(atom) for atom in jaxpr.outvars]

    def _node(self, eqn: Any, given: list[_Value], share: float) -> _Value:
        name = eqn.params["name"] if eqn.primitive.name == "name" else ""
        inputs = tuple(dict.fromkeys(v.node for v in given if v.node is not None))
        after = any(v.after for v in given)
        size = share * sum(_bytes(v.aval) for v in eqn.outvars) if name else 0.0
        flops, sent = share * equation_flops(eqn), share * sent_bytes(eqn)
        self.nodes.append(Node(flops, sent, inputs, name, size, after))
        return _Value(len(self.nodes) - 1, after)


def called(eqn: Any) -> Jaxpr | None:
    """The jaxpr that an equation calls once, None where there is none."""
    found = [sub for param in eqn.params.values() for sub in _jaxprs(param)]
    return found[0] if len(found) == 1 else None


def _jaxprs(param: Any) -> list[Jaxpr]:
    if isinstance(param, ClosedJaxpr):
        return [param.jaxpr]
    if isinstance(param, Jaxpr):
        return [param]
    if isinstance(param, tuple | list):
        return [sub for one in param for sub in _jaxprs(one)]
    return []


def _bytes(aval: Any) -> float:
    return float(math.prod(getattr(aval, "shape", ())) * getattr(aval.dtype, "itemsize", 4))


def equation_flops(eqn: Any) -> float:
    """FLOPs of the matrix products in an equation, loops by their trips.

    A loop of unknown length passes once over what its body slices; where it holds another such
    loop, that one does.
    """
    name = eqn.primitive.name
    if name == "dot_general":
        contract, batch = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contract[0])
    if name == "ragged_dot_general" or name == "ragged_dot":
        rows, weights = (v.aval.shape for v in eqn.invars[:2])
        return 2.0 * math.prod(rows) * weights[-1]
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel[2:])
    bodies = [sub for param in eqn.params.values() for sub in _jaxprs(param)]
    inner = sum(equation_flops(one) for body in bodies for one in body.eqns)
    if name == "scan":
        return inner * eqn.params["length"]
    if name == "while":
        return inner * _trips(eqn.params["body_jaxpr"].jaxpr)
    if name == "pallas_call":
        return inner * math.prod(eqn.params["grid_mapping"].grid)
    return inner


def sent_bytes(eqn: Any) -> float:
    """Bytes that an equation brings over links, loops by their trips."""
    name = eqn.primitive.name
    if name in _SENDS:
        return sum(_bytes(v.aval) for v in eqn.outvars)
    bodies = [sub for param in eqn.params.values() for sub in _jaxprs(param)]
    inner = sum(sent_bytes(one) for body in bodies for one in body.eqns)
    return inner * (eqn.params["length"] if name == "scan" else 0 if name == "while" else 1)


def _trips(body: Jaxpr) -> float:
    """Trips of a loop of unknown length, from its body."""
    equations = list(_flat(body))
    if any(eqn.primitive.name in _SENDS for eqn in equations):
        return 0.0
    if any(eqn.primitive.name == "while" for eqn in equations):
        return 1.0
    return max((_passes(eqn) for eqn in equations), default=1.0)


def _flat(jaxpr: Jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for sub in _jaxprs(param):
                yield from _flat(sub)


def _passes(eqn: Any) -> float:
    """How many of its slices cover what an equation slices; 1 for any other equation."""
    if eqn.primitive.name not in _SLICES:
        return 1.0
    whole, part = _SLICES[eqn.primitive.name]
    piece = eqn.outvars[0] if part is None else eqn.invars[part]
    sizes = math.prod(eqn.invars[whole].aval.shape), math.prod(piece.aval.shape)
    return sizes[0] / max(sizes[1], 1)
