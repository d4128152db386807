"""Leaving a run of several processes when it cannot go on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator

from moejax.cluster.place import COORDINATOR
from moejax.config import ConfigError

# sysexits.h's EX_TEMPFAIL: nothing is wrong with the run, it can be started again.
TRY_AGAIN = 75
_BAD_INPUT = 2
_NO_MEMORY = "RESOURCE_EXHAUSTED"


def code_of(signum: int | None, *, several: bool) -> int:
    """Exit code of a process that ended for a signal: 0 for none, or 128 + its number.

    Of several processes SIGTERM gives 0 too: a scheduler asked for the end and got it, and whoever
    starts failed jobs again is not to start this one. Not so in a pod of Kubernetes: there SIGTERM
    comes from a node that is drained or taken back, and a pod that ended with 0 counts as done.
    """
    drained = os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get(COORDINATOR)
    asked = several and signum == signal.SIGTERM and not drained
    return 0 if signum is None or asked else 128 + signum


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
    """Ends a process that fails among several, which wait for each other and would for minutes.

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
        if isinstance(error, KeyboardInterrupt):
            leave(f"{me}: interrupted.", code_of(signal.SIGINT, several=True))
        if isinstance(error, ConfigError | OSError):
            leave(f"{me}: {' '.join(str(error).split())}", _BAD_INPUT)
        why = " ".join(str(error).split())[:200]
        if isinstance(error, jax.errors.JaxRuntimeError) and _NO_MEMORY in why:
            leave(f"{me} has not enough memory: {why}", 1)
        if not isinstance(error, jax.errors.JaxRuntimeError):
            traceback.print_exc()
            leave(f"{me} failed; the others cannot go on without it.", 1)
        leave(
            f"{me} cannot go on, most likely because another is gone ({why}). Started again, the "
            "run goes on from its newest checkpoint."
        )
