"""A SLURM cluster of one node on this machine, from Debian's packages, in a folder of its own.

munged, slurmctld and slurmd, each on a port of its own: nothing of the system's SLURM is read or
written. No cgroups: processes are tracked by their group (`proctrack/pgid`). Debian's build takes
one node a host ("Duplicated NodeHostName"), so a job of several processes has several tasks on it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")

_CONF = """\
ClusterName=moejax
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits until its old credentials are void.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
MpiDefault=none
KillWait=30
ReturnToService=2
SlurmdPort={ports[1]}
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PATIENCE_S = 30.0


class Cluster:
    """A running cluster; commands find it by `env`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Writes the configuration, starts the daemons, waits for the node.

        Raises:
          RuntimeError: one of them does not come up; the end of its log is in the message.
        """
        host = socket.gethostname().split(".")[0]
        conf = _CONF.format(folder=self.folder, host=host, ports=[_free_port() for _ in range(2)])
        (self.folder / "slurm.conf").write_text(conf)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("state", f"spool.{host}"):
            (self.folder / name).mkdir()
        own = ("socket", "pid", "log", "seed")
        files = [f"--{n}{'' if n == 'socket' else '-file'}={self.folder}/munge.{n}" for n in own]
        self._spawn("munged", "--foreground", "--force", f"--key-file={key}", *files)
        self._wait(lambda: (self.folder / "munge.socket").exists(), "munged")
        self._spawn("slurmctld", "-D")
        self._spawn("slurmd", "-D")
        self._wait(lambda: self.ask("sinfo", "-h", "-o", "%t").strip() == "idle", "slurmd")

    def ask(self, *command: str) -> str:
        """What a command of SLURM prints, errors too."""
        done = subprocess.run(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What scontrol says about a job."""
        words = self.ask("scontrol", "-o", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _spawn(self, program: str, *options: str) -> None:
        path = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
        if path is None:
            raise RuntimeError(f"no {program} here: apt-get install slurm-wlm munge")
        with open(self.folder / f"{program}.out", "ab") as out:
            self._daemons.append(
                subprocess.Popen(
                    [path, *options], env=self.env, stdout=out, stderr=out, start_new_session=True
                )
            )

    def _wait(self, ready, what: str) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not ready():
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} does not come up:\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of all logs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"--- {f.name}\n{f.read_text(errors='replace')[-2000:]}" for f in files)

    def stop(self) -> None:
        """Ends all jobs, then the daemons that were started here, the last first."""
        if len(self._daemons) == 3:
            self.ask("scancel", "--user=root")
            with contextlib.suppress(RuntimeError):
                self._wait(lambda: not self.ask("squeue", "-h").strip(), "the end of the jobs")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextlib.contextmanager
def one_machine_cluster(folder: Path) -> Iterator[Cluster]:
    """A cluster, for a while."""
    cluster = Cluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
