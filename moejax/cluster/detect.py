"""Which launcher has started this process, and what it says about the others of the run."""

from __future__ import annotations

import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from moejax.cluster.place import (
    COORDINATOR,
    NUM_PROCESSES,
    PROCESS_ID,
    Membership,
    address,
    membership,
)
from moejax.config import ConfigError

# Above what Linux gives to outgoing connections (32768 to 60999), so that none holds the port.
_FIRST_PORT, _NUM_PORTS = 61440, 4096
_SHOWN = 60  # characters of a value in messages
PORT = "JAX_COORDINATOR_PORT"  # a port of the user's own; JAX's name for it

_SLURM = ("SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS", "SLURM_PROCID",
          "SLURM_LOCALID")  # fmt: skip
_OMPI = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
         "OMPI_COMM_WORLD_LOCAL_RANK")  # fmt: skip
_ORTE = "OMPI_MCA_orte_hnp_uri"  # where mpirun is, up to Open MPI 4
# What the files of launch/jobset make of the annotations that JobSet puts on its pods.
_JOBSET = ("JOBSET_COORDINATOR", "JOBSET_JOBS", "JOBSET_JOB_INDEX", "JOBSET_PODS_PER_JOB",
           "JOB_COMPLETION_INDEX")  # fmt: skip
_TPU = ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")


class Detected(NamedTuple):
    """A process's place, and who says so.

    Attributes:
      by: the launcher.
      why: the variables that told, and their values.
      place: None where JAX asks for it by itself: a TPU's metadata, the API of Kubernetes.
      local_devices: the devices this process is to use, None for all that it sees.
    """

    by: str
    why: str
    place: Membership | None
    local_devices: tuple[int, ...] | None = None


def detect(env: Mapping[str, str], *, has_tpu: bool = False) -> Detected | None:
    """The first of these that the environment knows; what stands nearer to the process goes first.

    1. MOEJAX_COORDINATOR, MOEJAX_NUM_PROCESSES, MOEJAX_PROCESS_ID: `moejax launch`, or by hand.
    2. Open MPI's mpirun. It may run inside a SLURM job.
    3. srun of SLURM.
    4. A pod of JobSet, as launch/jobset makes it.
    5. A TPU: what GKE puts into the environment, else the metadata of the machine (JAX asks).
    6. Any other pod of Kubernetes (JAX asks its API).

    Args:
      env: environment variables.
      has_tpu: whether TPU chips are here.
    Raises:
      ConfigError: one of them is there in part, two contradict each other, or a value is no place.
    """
    by_hand = _by_hand(env)
    started = _open_mpi(env) or _slurm(env, alone_is_fine=by_hand is not None)
    if by_hand is not None:
        _check_agreement(by_hand, started)
        return by_hand
    for found in (started, _jobset(env), _tpu(env, has_tpu)):
        if found is not None:
            return found
    if env.get("KUBERNETES_SERVICE_HOST"):
        return Detected("Kubernetes", _shown(env, ["KUBERNETES_SERVICE_HOST"]), None)
    return None


def tpu_is_here() -> bool:
    """Whether this machine has the devices of a TPU."""
    dev = pathlib.Path("/dev")
    vfio = pathlib.Path("/sys/bus/pci/drivers/vfio-pci")
    google = (path / "vendor" for path in vfio.glob("0000:*"))  # 0x1ae0 is Google
    return any(dev.glob("accel[0-9]*")) or any(
        path.exists() and path.read_text().strip() == "0x1ae0" for path in google
    )


def _by_hand(env: Mapping[str, str]) -> Detected | None:
    if env.get(COORDINATOR) and env.get(_OMPI[0]) and not env.get(NUM_PROCESSES):
        return None  # Open MPI 5 tells all but the coordinator, so that is given beside it
    place = membership(env)
    if place is None:
        return None
    return Detected("by hand", _shown(env, (NUM_PROCESSES, PROCESS_ID)), place)


def _check_agreement(by_hand: Detected, started: Detected | None) -> None:
    """A place that a launcher has copied from a shell to all its tasks would be everybody's."""
    if started is None or started.place is None or started.place.num_processes == 1:
        return
    given, place = by_hand.place, started.place
    assert given is not None
    if given[1:] != place[1:]:
        raise ConfigError(
            f"{NUM_PROCESSES}={given.num_processes} and {PROCESS_ID}={given.process_id}, but "
            f"{started.by} has started this process as {place.process_id} of "
            f"{place.num_processes} ({started.why}): unset the MOEJAX variables, or start one task."
        )


def _slurm(env: Mapping[str, str], *, alone_is_fine: bool) -> Detected | None:
    if not env.get("SLURM_JOB_ID"):
        return None
    if not env.get("SLURM_STEP_ID"):  # the job's script, which is no task
        if alone_is_fine:
            return None
        raise ConfigError(
            f"SLURM_JOB_ID={env['SLURM_JOB_ID']} without SLURM_STEP_ID: this is the script of a "
            "SLURM job, not one of its tasks. Start the command by srun, as launch/slurm.sh does."
        )
    _check_whole("SLURM", env, _SLURM)
    nodes, count, number, local = (_number(env, name) for name in _SLURM[1:])
    port = env.get(PORT) or _port(_number(env, "SLURM_JOB_ID") + _number(env, "SLURM_STEP_ID"))
    place = _checked("SLURM", f"{first_host(env[_SLURM[0]])}:{port}", count, number)
    why = _shown(env, ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID"))
    return Detected("SLURM", why, place, _own_device(env, count > nodes, local))


def _open_mpi(env: Mapping[str, str]) -> Detected | None:
    if not env.get(_OMPI[0]):
        return None
    _check_whole("Open MPI", env, _OMPI)
    count, number, here, local = (_number(env, name) for name in _OMPI)
    place = _checked("Open MPI", _mpi_coordinator(env, alone=here == count), count, number)
    return Detected("Open MPI", _shown(env, _OMPI[:2]), place, _own_device(env, here > 1, local))


def _mpi_coordinator(env: Mapping[str, str], *, alone: bool) -> str:
    """What was given, else where mpirun is, which runs beside process 0."""
    if env.get(COORDINATOR):
        return address(env[COORDINATOR])
    job = env.get(_ORTE) or env.get("PMIX_NAMESPACE") or env.get("OMPI_COMM_WORLD_SIZE", "")
    port = env.get(PORT) or _port(zlib.crc32(job.encode()))
    if alone:
        return f"127.0.0.1:{port}"
    if found := re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", env.get(_ORTE, "")):
        return f"{found[1] or f'[{found[2]}]'}:{port}"
    raise ConfigError(
        "Open MPI does not tell where process 0 is: give all of them its place, as in mpirun "
        f"-x {COORDINATOR}=HOST:PORT."
    )


def _jobset(env: Mapping[str, str]) -> Detected | None:
    if not any(env.get(name) for name in _JOBSET[:-1]):
        return None
    _check_whole("JobSet", env, _JOBSET)
    jobs, job, pods, pod = (_number(env, name) for name in _JOBSET[1:])
    if job >= jobs or pod >= pods:
        raise ConfigError(f"JobSet: {_shown(env, _JOBSET[1:])}: an index is not below its number.")
    address = env["JOBSET_COORDINATOR"]
    port = "" if ":" in address else f":{env.get(PORT) or _FIRST_PORT}"
    place = Membership(f"{address}{port}", jobs * pods, job * pods + pod)
    return Detected("JobSet", _shown(env, _JOBSET), place)


def _tpu(env: Mapping[str, str], has_tpu: bool) -> Detected | None:
    if any(env.get(name) for name in _TPU):
        _check_whole("TPU of GKE", env, _TPU)
        hosts, number = env[_TPU[0]].split(","), _number(env, _TPU[1])
        if number >= len(hosts):
            raise ConfigError(f"{_shown(env, _TPU)}: {len(hosts)} hosts have no number {number}.")
        return Detected("TPU of GKE", _shown(env, _TPU), None) if has_tpu else None
    return Detected("TPU", "chips are here, its metadata has the others", None) if has_tpu else None


def _own_device(env: Mapping[str, str], several: bool, local: int) -> tuple[int, ...] | None:
    """Tasks that share a host take one GPU each, unless their launcher has shared them out."""
    bound = env.get("CUDA_VISIBLE_DEVICES", "")
    return (local,) if several and ("," in bound or not bound) else None


def first_host(nodes: str) -> str:
    """The first of a SLURM list of nodes: `gpu[003-005,9],b1` -> `gpu003`."""
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else nodes


def _port(job: int) -> int:
    return _FIRST_PORT + job % _NUM_PORTS


def _checked(by: str, coordinator: str, count: int, number: int) -> Membership:
    if number >= count:
        raise ConfigError(f"{by} says process {number} of {count}: numbers go from 0 to count - 1.")
    return Membership(coordinator, count, number)


def _check_whole(by: str, env: Mapping[str, str], names: Sequence[str]) -> None:
    if missing := [name for name in names if not env.get(name)]:
        there = [name for name in names if env.get(name)]
        raise ConfigError(
            f"{by}: {', '.join(there) or 'its job'} without {', '.join(missing)}. Set them too, or "
            f"unset all and give {COORDINATOR}, {NUM_PROCESSES} and {PROCESS_ID}."
        )


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r} is no whole number.")
    return int(text)


def _shown(env: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={_short(env[name])}" for name in names)


def _short(text: str) -> str:
    """Lists of hosts can be pages long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
