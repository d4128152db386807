"""`moejax launch local`: a run of several real processes is the run of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moejax.cli.main import main
from tests.e2e.small import PATIENCE_S, ROOT, command, flags, rows, steps_on_disk
from tests.environment import clean_environment

# One layer is one program to compile, in every process.
FEW = {
    "model__num_layers": 1, "model__attention": "kda", "mesh__fsdp": 2, "mesh__expert": 1,
    "train__num_steps": 4, "checkpoint__every": 2, "eval__every": 0, "log__tensorboard": False,
}  # fmt: skip


def launch(workdir: Path, *, processes: int = 2, devices: int = 1, **changes) -> subprocess.Popen:
    """A training run of several processes, away from the settings of this test run."""
    clean = clean_environment()
    return subprocess.Popen(
        [sys.executable, "-m", "moejax.cli.main", "launch", "local", f"--processes={processes}",
         f"--devices-per-process={devices}", "--", "train", f"--workdir={workdir}",
         *flags(**FEW | changes)],
        cwd=ROOT, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def _ended(process: subprocess.Popen) -> tuple[int, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out + err


def _same_losses(one: Path, other: Path) -> None:
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(
            [row[name] for row in rows(one)], [row[name] for row in rows(other)], rtol=1e-6
        )


def test_two_processes_are_the_run_of_one(tmp_path):
    code, said = _ended(launch(tmp_path / "two"))
    assert code == 0, said
    assert said.count("validation loss") == 1  # the other process is silent
    assert steps_on_disk(tmp_path / "two") == [2, 4]
    assert (tmp_path / "two" / "logs" / "process-00001.log").exists()
    code, said = _ended(command(tmp_path / "one", 2, flags(**FEW)))
    assert code == 0, said
    _same_losses(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_four_processes_of_two_devices_with_experts_apart(tmp_path):
    apart = FEW | {"mesh__expert": 4}
    code, said = _ended(launch(tmp_path / "four", processes=4, devices=2, mesh__expert=4))
    assert code == 0, said
    code, said = _ended(command(tmp_path / "one", 8, flags(**apart)))
    assert code == 0, said
    _same_losses(tmp_path / "one", tmp_path / "four")


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_one_step_and_the_run_goes_on(tmp_path):
    run = launch(tmp_path / "run", train__num_steps=100_000, checkpoint__every=0)
    _wait_for_step(tmp_path / "run", 2)
    children = subprocess.run(
        ["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(children[1]), signal.SIGTERM)
    code, said = _ended(run)
    assert code == 0, said
    (stopped,) = steps_on_disk(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["step"] == stopped
    again = launch(tmp_path / "run", train__num_steps=stopped + 2, checkpoint__every=0)
    code, said = _ended(again)
    assert code == 0, said
    assert "resuming from" in said
    code, said = _ended(
        command(tmp_path / "one", 2, flags(**FEW | {"train__num_steps": stopped + 2}))
    )
    assert code == 0, said
    _same_losses(tmp_path / "one", tmp_path / "run")


def _wait_for_step(workdir: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (workdir / "metrics.jsonl").exists() or len(rows(workdir)) < step:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["remote", "--processes=2", "--", "train"], "only `local` is known"),
        (["local", "--", "train"], "--processes=N is needed"),
        (["local", "--processes=2"], "give the command after --"),
        (["local", "--processes=2", "--", "compile"], "give the command after --"),
        (["local", "--processes=2", "--restarts=-1", "--", "train"], "--restarts must be"),
    ],
)
def test_what_cannot_be_launched_is_one_line(argv, says, capsys):
    assert main(["launch", *argv]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
