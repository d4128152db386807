"""How a process finds the others of its run."""

from __future__ import annotations

import itertools
import os

from moejax.cluster.detect import Detected, detect, tpu_is_here
from moejax.cluster.place import COORDINATOR, NUM_PROCESSES, PROCESS_ID
from moejax.config import ConfigError

_HOW = (
    "Start the run by `moejax launch`, srun, mpirun or a JobSet, or set "
    f"{COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}."
)
_met = itertools.count()


def meet(patience_s: float = 3600.0) -> None:
    """Returns when all processes of the run have come here, as often as this one.

    They wait for the coordinator and not for a device: a collective gives up when the others are
    half a minute late, as they are when they still compile.
    """
    import orbax.checkpoint as ocp

    wait = ocp.multihost.get_barrier_sync_fn()  # does nothing in a process that is alone
    wait(key=f"moejax-{next(_met)}", timeout_ms=int(1000 * patience_s))


def join() -> Detected:
    """Joins the other processes of the run, where `detect` finds this one's place.

    Returns:
      Who has told the place, and how.
    Raises:
      ConfigError: nobody has, they contradict each other, or the others do not come.
    """
    import jax  # reads its settings once, so not before the caller has made them

    found = detect(os.environ, has_tpu=tpu_is_here())
    if found is None:
        raise ConfigError(f"--multihost: nothing here names the other processes. {_HOW}")
    try:
        if found.place is None:
            jax.distributed.initialize()
        else:
            # JAX would give each task of SLURM and Open MPI one GPU, a task alone on its host too.
            own = None if found.local_devices is None else list(found.local_devices)
            jax.distributed.initialize(
                *found.place, local_device_ids=own, cluster_detection_method="deactivate"
            )
    except (RuntimeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"--multihost ({found.by}: {found.why}): {why}. {_HOW}") from error
    return found
