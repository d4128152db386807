"""`launch/slurm.sh` in a real SLURM: a run queued again, twice, is the run of `launch local`.

Needs Debian's packages slurm-wlm and munge, and root: `./launch/test.sh slurm`.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.one_slurm import Cluster, one_machine_cluster
from tests.cluster.test_launch import FEW, _ended, launch
from tests.e2e.small import PATIENCE_S, ROOT, flags, rows, steps_on_disk
from tests.environment import clean_environment

pytestmark = pytest.mark.slurm

STEPS = 600
LONGER = FEW | {"train__num_steps": STEPS, "checkpoint__every": 50}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with one_machine_cluster(tmp_path_factory.mktemp("slurm")) as running:
        # the command of the environment that runs these tests
        running.env["MOEJAX"] = str(Path(sys.executable).parent / "moejax")
        yield running


def _submit(cluster: Cluster, log: Path, *arguments: str) -> str:
    """The number of a job of two tasks on the one node."""
    # compiled as what `launch` starts is, or the two round otherwise
    clean = f"XLA_FLAGS={clean_environment().get('XLA_FLAGS', '')},JAX_PLATFORMS="
    said = cluster.ask(
        "sbatch", "--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={log}",
        f"--export=ALL,PLATFORM=cpu,MOEJAX_ROOT={ROOT},{clean}",
        str(ROOT / "launch/slurm.sh"), *arguments,
    )  # fmt: skip
    found = re.search(r"Submitted batch job (\d+)", said)
    assert found, said
    return found[1]


def _wait(cluster: Cluster, number: str, log: Path, what) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        job = cluster.job(number)
        told = f"{job}\n{log.read_text() if log.exists() else 'no log'}\n{cluster.logs()}"
        assert time.monotonic() < deadline, told
        assert job["JobState"] not in OVER, told
        time.sleep(0.1)


def _reached(workdir: Path, step: int):
    return lambda: (workdir / "metrics.jsonl").exists() and len(rows(workdir)) > step


def test_a_job_queued_again_twice_is_the_run_of_launch_local(cluster, tmp_path):
    workdir, log = tmp_path / "slurm", tmp_path / "job.log"
    number = _submit(cluster, log, f"--workdir={workdir}", *flags(**LONGER))

    # what SLURM sends when the time is nearly up: the run saves and the script queues it again
    _wait(cluster, number, log, _reached(workdir, 20))
    assert not cluster.ask("scancel", "--batch", "--signal=USR2", number)
    _wait(cluster, number, log, lambda: cluster.job(number)["Restarts"] == "1")
    (stopped,) = [step for step in steps_on_disk(workdir) if step % 50] or [0]
    assert 20 < stopped < STEPS

    # a requeue from outside kills it, as a host that fails does
    _wait(cluster, number, log, _reached(workdir, stopped + 60))
    assert not cluster.ask("scontrol", "requeue", number)
    _wait(cluster, number, log, lambda: cluster.job(number)["Restarts"] == "2")
    _wait_for_the_end(cluster, number, log)

    text = log.read_text()
    assert "2 processes joined (SLURM: SLURM_JOB_ID=" in text
    assert text.count("resuming from") == 2
    assert rows(workdir)[-1]["step"] == STEPS
    code, said = _ended(launch(tmp_path / "local", **LONGER))
    assert code == 0, said
    for name in ("loss", "grad_norm"):
        got, want = ([row[name] for row in rows(tmp_path / x)] for x in ("slurm", "local"))
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _wait_for_the_end(cluster: Cluster, number: str, log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (state := cluster.job(number)["JobState"]) not in OVER:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert state == "COMPLETED", log.read_text()


def test_bad_input_ends_the_job_with_2_and_is_not_tried_again(cluster, tmp_path):
    log = tmp_path / "job.log"
    number = _submit(cluster, log, "--config=nothing_like_it", f"--workdir={tmp_path}/run")
    deadline = time.monotonic() + PATIENCE_S
    while (job := cluster.job(number))["JobState"] not in OVER:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert "error: " in log.read_text() and "Traceback" not in log.read_text()
