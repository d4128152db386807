"""An operator beside the plain way to compute the same: time and temporaries on this machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Comparison(NamedTuple):
    """Two functions of the same arguments that give the same.

    Attributes:
      op: folder of the operator.
      what: "forward", or "forward + backward".
      size: dimensions, as "B1 T1024 N4 H64".
      against: what `old` is, in a few words.
      new, old: ours, and the plain one.
      make: draws the arguments; only then do they take memory.
      faster: times that `new` should be faster; None promises nothing. Clocks of a shared machine
        swing by a factor of two.
      smaller: times that the temporaries must be smaller; the compiler states them, so they are
        exact.
    """

    op: str
    what: str
    size: str
    against: str
    new: Callable[..., Any]
    old: Callable[..., Any]
    make: Callable[[], tuple[Any, ...]]
    faster: float | None = None
    smaller: float | None = None


class Result(NamedTuple):
    """What a comparison gave; milliseconds and bytes of temporaries."""

    op: str
    what: str
    size: str
    dtype: str
    against: str
    old_ms: float
    new_ms: float
    old_bytes: int
    new_bytes: int
    faster: float | None
    smaller: float | None

    @property
    def time_ratio(self) -> float:
        """Times that ours is faster."""
        return self.old_ms / max(self.new_ms, 1e-9)

    @property
    def memory_ratio(self) -> float:
        """Times that our temporaries are smaller; a program without any counts as one byte."""
        return max(self.old_bytes, 1) / max(self.new_bytes, 1)

    @property
    def time_held(self) -> bool:
        return self.faster is None or self.time_ratio >= self.faster

    @property
    def memory_held(self) -> bool:
        return self.smaller is None or self.memory_ratio >= self.smaller


def run(comparison: Comparison, rounds: int = 3) -> Result:
    """Compiles both, runs them in turn, and keeps the best time of each after a warm-up."""
    args = comparison.make()
    programs = {
        name: jax.jit(fn).lower(*args).compile()
        for name, fn in (("old", comparison.old), ("new", comparison.new))
    }
    best = best_seconds(programs, args, rounds)
    c, memory = comparison, {name: temp_bytes(p) for name, p in programs.items()}
    floats = [a for a in jax.tree.leaves(args) if jnp.issubdtype(a.dtype, jnp.floating)]
    return Result(
        c.op, c.what, c.size, str(floats[0].dtype), c.against, best["old"] * 1e3, best["new"] * 1e3,
        memory["old"], memory["new"], c.faster, c.smaller,
    )  # fmt: skip


def best_seconds(
    programs: Mapping[str, Callable[..., Any]], args: Sequence[Any], rounds: int
) -> dict[str, float]:
    """Best time of each program, run in turn so that a busy machine is slow for all of them."""
    best = dict.fromkeys(programs, float("inf"))
    for i in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*args))
            if i:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def temp_bytes(compiled: Any) -> int:
    """Bytes of temporaries of a compiled function; 0 where the platform does not tell."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


def gradients(fn: Callable[..., Any], argnums: tuple[int, ...]) -> Callable[..., Any]:
    """Gradients of half the sum of squares of everything that `fn` returns."""

    def half_squares(*args: Any) -> jax.Array:
        outputs = jax.tree.leaves(fn(*args))
        floats = [o for o in outputs if jnp.issubdtype(o.dtype, jnp.floating)]
        return sum((jnp.sum(o.astype(jnp.float32) ** 2) / 2 for o in floats), jnp.float32(0))

    return jax.grad(half_squares, argnums)


def both_ways(
    op: str, size: str, against: str, new: Callable[..., Any], old: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]], *, argnums: tuple[int, ...],
    forward: tuple[float | None, float | None] = (None, None),
    backward: tuple[float | None, float | None] = (None, None),
) -> list[Comparison]:  # fmt: skip
    """A comparison forward and one with gradients; floors are (faster, smaller)."""
    grads = gradients(new, argnums), gradients(old, argnums)
    return [
        Comparison(op, "forward", size, against, new, old, make, *forward),
        Comparison(op, "forward + backward", size, against, *grads, make, *backward),
    ]


def machine() -> dict[str, str]:
    """What ran and on what: for the head of a table."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    device = jax.devices()[0]
    return {
        **versions, "python": platform.python_version(), "platform": device.platform,
        "device": device.device_kind, "cores": str(os.cpu_count()), "os": platform.platform(),
    }  # fmt: skip


def lines(results: Iterable[Result]) -> Iterator[str]:
    """The results one a line, for terminals and pipes."""
    for r in results:
        floors = ", ".join(floor_texts(r))
        yield (
            f"{r.op} {r.what}, {r.size} {r.dtype}, against {r.against}: "
            f"{r.old_ms:.2f} -> {r.new_ms:.2f} ms ({r.time_ratio:.1f} x), "
            f"{r.old_bytes / 1e6:.2f} -> {r.new_bytes / 1e6:.2f} MB ({r.memory_ratio:.1f} x)"
            + (f"; floor {floors}" if floors else "")
        )


def floor_texts(result: Result) -> list[str]:
    """The floors of a result as text: of time, of memory."""
    texts = []
    if result.faster is not None:
        texts.append(f"time {result.faster:g} x")
    if result.smaller is not None:
        texts.append(f"memory 1/{result.smaller:g}")
    return texts


def print_all(comparisons: Iterable[Comparison], rounds: int = 3) -> None:
    """Runs and prints one after another: the `main` of an operator's bench."""
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    for comparison in comparisons:
        print(*lines([run(comparison, rounds)]), flush=True)
