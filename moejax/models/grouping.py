"""Cutting a list of layers into runs and one repeated group.

So a deep model compiles like a shallow one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class LayerKind(NamedTuple):
    """What decides a layer's code: layers of one kind can share a scan."""

    attention: str
    ffn: str


@dataclasses.dataclass(frozen=True)
class Run:
    """`count` neighbouring layers of one kind."""

    kind: LayerKind
    count: int


class Segment(NamedTuple):
    """`repeats` times the same runs in a row, starting at layer `first`."""

    first: int
    repeats: int
    runs: tuple[Run, ...]

    @property
    def period(self) -> int:
        """Layers in one repeat."""
        return sum(run.count for run in self.runs)


def layer_places(segments: Sequence[Segment]) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """For each layer in order: its stack, its run, and its place in the stacked dims."""
    for s, segment in enumerate(segments):
        for repeat in range(segment.repeats):
            for r, run in enumerate(segment.runs):
                for i in range(run.count):
                    yield s, r, (repeat, i)


def runs_of(kinds: Sequence[LayerKind]) -> tuple[Run, ...]:
    """Run-length form of a list of layers."""
    runs: list[Run] = []
    for kind in kinds:
        if runs and runs[-1].kind == kind:
            runs[-1] = Run(kind, runs[-1].count + 1)
        else:
            runs.append(Run(kind, 1))
    return tuple(runs)


def segments_of(kinds: Sequence[LayerKind]) -> tuple[Segment, ...]:
    """The layers as a head, one repeated group and a tail, with as few bodies to compile as can be.

    K3's 93 layers become: a dense KDA layer and two KDA layers; 22 times (an MLA layer, three
    KDA layers); two MLA layers. That is five layer bodies whatever the depth.
    """
    kinds = list(kinds)
    best = _segment_list(kinds, 0, len(kinds), 1)
    for period in range(1, len(kinds) // 2 + 1):
        first = 0
        while first + 2 * period <= len(kinds):
            repeats = 1
            while (
                kinds[first : first + period]
                == kinds[first + repeats * period : first + (repeats + 1) * period]
            ):
                repeats += 1
            if repeats > 1:
                candidate = _segment_list(kinds, first, period, repeats)
                if _bodies(candidate) < _bodies(best):
                    best = candidate
            first += 1
    return best


def _segment_list(
    kinds: list[LayerKind], first: int, period: int, repeats: int
) -> tuple[Segment, ...]:
    last = first + period * repeats
    parts = [
        (0, 1, kinds[:first]),
        (first, repeats, kinds[first : first + period]),
        (last, 1, kinds[last:]),
    ]
    return tuple(Segment(start, times, runs_of(part)) for start, times, part in parts if part)


def _bodies(segments: tuple[Segment, ...]) -> int:
    return sum(len(segment.runs) for segment in segments)
