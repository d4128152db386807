"""Clocks: time of a program on a device, and time that is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

# A run of calls should last so long that the clock and the start of a call do not count.
_RUN_S = 0.03
_REPEATS = 5
_MOST = 50


class Budget:
    """Seconds that a bench may take. Steps that would pass its end are not begun."""

    def __init__(self, seconds: float):
        self._end = time.perf_counter() + seconds
        self._longest = 0.0

    def left(self) -> float:
        return self._end - time.perf_counter()

    def allows(self) -> bool:
        """Whether as long a step as the longest so far still fits."""
        return self.left() > self._longest

    def took(self, seconds: float) -> None:
        """Tells how long a step was."""
        self._longest = max(self._longest, seconds)


def device_seconds(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of one call, without what every call or every wait costs the host.

    n calls are queued and waited for, then 2n: the difference is n calls. The median of five such
    differences, over arguments that take turns, so that no call finds its own in the cache.

    Args:
      program: compiled.
      sets: arguments; more bytes together than the device's cache holds.
    """
    for i in range(3):
        jax.block_until_ready(program(*sets[i % len(sets)]))
    one = _queued(program, sets, 2) / 2
    count = max(2, min(_MOST, round(_RUN_S / max(one, 1e-6))))
    found = [
        (_queued(program, sets, 2 * count) - _queued(program, sets, count)) / count
        for _ in range(_REPEATS)
    ]
    return max(statistics.median(found), 1e-9)


def once(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> float:
    """Seconds of a single call: for a dry run, whose times mean nothing."""
    return _queued(program, sets, 1)


def _queued(program: Callable[..., Any], sets: Sequence[tuple[Any, ...]], count: int) -> float:
    start = time.perf_counter()
    out = None
    for i in range(count):
        out = program(*sets[i % len(sets)])
    jax.block_until_ready(out)
    return time.perf_counter() - start
