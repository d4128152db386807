"""How a process finds the others of its run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import NamedTuple

from moejax.config import ConfigError

# What `moejax launch` gives its processes, and a user's own script may.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = (
    "MOEJAX_COORDINATOR", "MOEJAX_NUM_PROCESSES", "MOEJAX_PROCESS_ID",
)  # fmt: skip


class Membership(NamedTuple):
    """A process's place in a run.

    Attributes:
      coordinator: host:port of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int

    def as_env(self) -> dict[str, str]:
        """Environment variables that `membership` reads."""
        names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
        return dict(zip(names, map(str, self), strict=True))


def membership(env: Mapping[str, str]) -> Membership | None:
    """The place that the environment names; None where it names none.

    Raises:
      ConfigError: it names a part of one, or something that is no place.
    """
    given = {name: env[name] for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if env.get(name)}
    if not given:
        return None
    missing = [n for n in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if n not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} without {', '.join(missing)}: give all three, or none of them."
        )
    count, number = given[NUM_PROCESSES], given[PROCESS_ID]
    if not (count.isdigit() and number.isdigit() and int(number) < int(count)):
        raise ConfigError(
            f"{PROCESS_ID}={number} of {NUM_PROCESSES}={count}: give a number of processes, and "
            "for each another number from 0 below it."
        )
    return Membership(given[COORDINATOR], int(count), int(number))


_met = itertools.count()


def meet(patience_s: float = 3600.0) -> None:
    """Returns when all processes of the run have come here, as often as this one.

    They wait for the coordinator and not for a device: a collective gives up when the others are
    half a minute late, as they are when they still compile.
    """
    import orbax.checkpoint as ocp

    wait = ocp.multihost.get_barrier_sync_fn()  # does nothing in a process that is alone
    wait(key=f"moejax-{next(_met)}", timeout_ms=int(1000 * patience_s))


def join() -> None:
    """Joins the other processes of the run.

    Its place is what the environment names (see `membership`), else what JAX finds by itself:
    SLURM, Open MPI, Kubernetes, TPU pods.

    Raises:
      ConfigError: there is no place, or the others do not come.
    """
    import jax  # reads its settings once, so not before the caller has made them

    place = membership(os.environ)
    try:
        if place is None:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(*place)
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"--multihost: {why}. Start the run by `moejax launch`, srun, mpirun or a job of "
            f"Kubernetes, or set {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}."
        ) from error
