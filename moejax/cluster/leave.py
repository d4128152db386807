"""Leaving a run of several processes when it cannot go on."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

from moejax.config import ConfigError

# sysexits.h's EX_TEMPFAIL: nothing is wrong with the run, it can be started again.
TRY_AGAIN = 75
_BAD_INPUT = 2


def leave(line: str, code: int = TRY_AGAIN) -> None:
    """Says why and ends this process at once.

    Without the interpreter's own end: there JAX waits five minutes for the processes that are gone.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        print(f"error: {line}", file=sys.stderr, flush=True)
    os._exit(code)


@contextlib.contextmanager
def leaving_together(*passing: type[BaseException]) -> Iterator[None]:
    """Ends a process whose step or save fails among several, which all wait for each other.

    Alone it lets every error pass, and always those of `passing`: all processes have them at once.
    """
    import jax

    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1 or isinstance(error, passing):
            raise
        if os.environ.get("MOEJAX_DEBUG") == "1":
            traceback.print_exc()
        me = f"process {jax.process_index()} of {jax.process_count()}"
        if isinstance(error, ConfigError | OSError):
            leave(f"{me}: {' '.join(str(error).split())}", _BAD_INPUT)
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
            leave(f"{me} failed; the others cannot go on without it.", 1)
        why = " ".join(str(error).split())[:200]
        leave(
            f"{me} cannot go on, most likely because another is gone ({why}). Started again, the "
            "run goes on from its newest checkpoint."
        )
