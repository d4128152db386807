"""A run that is stopped from outside, politely and not: process after process on one workdir."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from moejax.cli.main import main
from tests.e2e.small import PATIENCE_S, command, flags, losses, rows, steps_on_disk


def _wait_for_step(workdir: Path, step: int, alive) -> None:
    """Returns once `step` is in the metrics."""
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and alive():
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        if len(lines) >= step:
            return
        time.sleep(0.05)


def _stopped_by(signum: int, workdir: Path, step: int, argv: list[str]) -> tuple[int, str, str]:
    """Exit code and output of the command, sent `signum` once `step` was done."""
    process = command(workdir, 8, argv)
    _wait_for_step(workdir, step, lambda: process.poll() is None)
    process.send_signal(signum)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.fixture
def argv(compile_cache: Path) -> list[str]:
    """A run without an end, of the program that is compiled already."""
    return flags(train__num_steps=1_000_000, compile_cache=compile_cache)


def test_killed_stopped_and_interrupted(straight, argv, tmp_path, capfd):
    """SIGKILL loses what is not on disk, SIGTERM and Ctrl-C nothing; all of it is one curve."""
    workdir = tmp_path / "work"
    code, _, err = _stopped_by(signal.SIGKILL, workdir, 5, argv)
    assert code == -signal.SIGKILL, err
    reached, newest = len(rows(workdir)), steps_on_disk(workdir)[-1]
    assert newest >= 2 and reached >= 5

    code, out, err = _stopped_by(signal.SIGTERM, workdir, reached + 2, argv)
    assert code == 128 + signal.SIGTERM, err
    assert f"resuming from {workdir / 'checkpoints' / str(newest)}\n" in out
    assert "compilation cache warm" in out
    saved_at = steps_on_disk(workdir)[-1]
    assert f"stopped by SIGTERM after step {saved_at}" in out
    assert rows(workdir)[-1]["step"] == saved_at

    def interrupt() -> None:
        _wait_for_step(workdir, saved_at + 2, lambda: True)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    capfd.readouterr()
    assert main(["train", f"--workdir={workdir}", *argv]) == 128 + signal.SIGINT
    out = capfd.readouterr().out
    assert f"resuming from {workdir / 'checkpoints' / str(saved_at)}\n" in out
    last = rows(workdir)[-1]["step"]
    assert f"stopped by SIGINT after step {last}" in out and steps_on_disk(workdir)[-1] == last
    assert [row["step"] for row in rows(workdir)] == list(range(1, last + 1))
    assert losses(workdir)[:20] == losses(straight.workdir)[: min(last, 20)]
