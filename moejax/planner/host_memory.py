"""Memory of this machine while it compiles for others: a K3-sized step is gigabytes of program."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Iterator

import jax

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of glibc's mallopt
_LARGE_BYTES = 128 * 1024


def host_bytes() -> int:
    """Largest resident memory of this process so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def keep_one_arena() -> None:
    """Asks the allocator for one arena that gives large blocks back as soon as they are free.

    A compiler's threads free what others have allocated: with an arena each, a tenth of the memory
    of a K3.1 compilation is held by nobody. Nothing happens where the allocator is not glibc's.
    """
    if (mallopt := _libc("mallopt")) is not None:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)
        mallopt(_TRIM_THRESHOLD, _LARGE_BYTES)


def forget_traces() -> None:
    """Drops what JAX keeps of traced functions: nothing is traced twice in a compilation."""
    jax.clear_caches()
    give_back()


def give_back() -> None:
    """Returns freed memory to the system: what a compiler leaves behind is half of its peak."""
    gc.collect()
    if (malloc_trim := _libc("malloc_trim")) is not None:
        malloc_trim(0)


@contextlib.contextmanager
def giving_back(every_s: float = 2.0) -> Iterator[None]:
    """Returns freed memory to the system again and again, from a thread of its own.

    A compiler frees what one of its stages needed while the next one asks for blocks of other
    sizes: what lies between them stays resident otherwise, and peaks when the program is assembled.
    """
    malloc_trim, done = _libc("malloc_trim"), threading.Event()
    if malloc_trim is None:
        yield
        return

    def work() -> None:
        while not done.wait(every_s):
            malloc_trim(0)

    thread = threading.Thread(target=work, name="giving memory back", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _libc(name: str):
    """A function of the C library, or None where it has none of that name."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)
