"""Compiling the step ahead of its first call, once, with what it cost.

And the cache that saves compiling next time.
"""

from __future__ import annotations

import errno
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from moejax.cluster import meet
from pallas_kernels.choose import Choice, recording

_CACHE_SETTING = "jax_compilation_cache_dir"
_events = {"hits": 0, "misses": 0}
_listening = False


def _listen() -> None:
    global _listening
    if _listening:
        return

    def on_event(event: str, **_: Any) -> None:
        if event.endswith("/compilation_cache/cache_hits"):
            _events["hits"] += 1
        elif event.endswith("/compilation_cache/cache_misses"):
            _events["misses"] += 1

    jax.monitoring.register_event_listener(on_event)
    _listening = True


def enable_cache(setting: str) -> pathlib.Path | None:
    """Turns on JAX's persistent compilation cache.

    Args:
      setting: a folder; "auto" for the user's cache folder; "off" for none.
    Returns:
      The folder, None without a cache.
    """
    _listen()
    if setting == "off":
        return None
    chosen = getattr(jax.config, _CACHE_SETTING)
    if chosen and setting == "auto":  # the caller has chosen one already
        return pathlib.Path(chosen)
    folder = pathlib.Path(setting).expanduser()
    if setting == "auto":
        root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folder = pathlib.Path(root).expanduser() / "moejax" / "jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:  # this costs time, nothing else
        warnings.warn(
            f"compile_cache={setting}: {folder} cannot be written ({error.strerror}); compiled "
            "programs are not kept. Name another folder, or 'off'.",
            stacklevel=2,
        )
        return None
    jax.config.update(_CACHE_SETTING, str(folder))
    return folder


class Compiled(NamedTuple):
    """A compiled program and what is known of it.

    Attributes:
      call: the executable, a jax.stages.Compiled.
      compile_s: seconds of tracing, lowering and compiling.
      cache: "warm" when it came out of the cache, "cold" when it was compiled, "off" without a
        cache.
      traces: how often the Python function was traced since; a list so that it counts on. 1 is
        right.
      peak_bytes: memory a device needs while it runs: arguments, results and temporaries.
      kernels: which implementation each operator in it is.
    """

    call: Any
    compile_s: float
    cache: str
    traces: list[int]
    peak_bytes: int
    kernels: dict[str, tuple[Choice, ...]]


def compile_once(
    fn: Callable, *args: Any, before_compile: Callable[[], None] | None = None, **jit_options: Any
) -> Compiled:
    """`fn` compiled for arguments of these shapes and shardings (arrays or ShapeDtypeStructs).

    `before_compile` is called between tracing and compilation.
    """
    traces = [0]

    def counted(*inner):
        traces[0] += 1
        return fn(*inner)

    _listen()
    before, start = dict(_events), time.perf_counter()
    with recording() as kernels:
        lowered = jax.jit(counted, **jit_options).lower(*args)
    if before_compile is not None:
        before_compile()
    executable = lowered.compile()
    meet()  # so that nobody runs it long before the others have it
    seconds = time.perf_counter() - start
    hit = _events["hits"] > before["hits"]
    missed = _events["misses"] > before["misses"]
    cache = "warm" if hit else "cold" if missed else "off"
    return Compiled(executable, seconds, cache, traces, _peak_bytes(executable), kernels)


def kernel_lines(kernels: Mapping[str, Sequence[Choice]]) -> list[str]:
    """What runs the operators, then every implementation that refused, why and which of them."""
    chosen: dict[str, dict[str, None]] = {}  # dicts for sets that keep their order
    refused: dict[str, dict[str, None]] = {}
    for op, choices in sorted(kernels.items()):
        for choice in choices:
            how = " (Pallas' interpreter, slow)" if choice.interpreted else ""
            chosen.setdefault(f"operators by {choice.impl}{how}", {})[op] = None
            for name, why in choice.refused:
                refused.setdefault(f"not by {name} ({why})", {})[op] = None
    return [f"{what}: {', '.join(ops)}" for what, ops in [*chosen.items(), *refused.items()]]


def _peak_bytes(executable: Any) -> int:
    memory = executable.memory_analysis()
    if memory is None:
        return 0
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return held + memory.temp_size_in_bytes
