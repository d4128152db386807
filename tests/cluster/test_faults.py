"""What kills runs, done to one of several real processes; the loss goes on as if nothing had been.

`moejax/cluster/README.md` has the table.
"""

from __future__ import annotations

import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.faults import ENDLESS, FIVE, Job
from tests.e2e.small import losses, rows, steps_on_disk

LAST = FIVE["train__num_steps"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def straight(tmp_path_factory, cache) -> Path:
    """The run that nothing happens to."""
    job = Job(tmp_path_factory.mktemp("straight") / "run", cache)
    assert job.end() == 0, job.said
    return job.workdir


def _ends_like(job: Job, straight: Path) -> None:
    assert job.end() == 0, job.said
    assert [row["step"] for row in rows(job.workdir)] == list(range(1, LAST + 1))
    assert losses(job.workdir) == losses(straight), job.said


def test_a_process_killed_in_a_step_costs_the_steps_since_the_checkpoint(tmp_path, cache):
    """The steps that are made again are the steps that were lost, to the bit."""
    job = Job(tmp_path / "run", cache, "--restarts=1", train__num_steps=ENDLESS)
    job.wait_for_step(5)
    job.kill(1)
    job.wait_for(lambda: "starting again" in job.said)
    before = losses(job.workdir, last=ENDLESS)
    newest = steps_on_disk(job.workdir)[-1]
    job.wait_for(lambda: f"resuming from {job.workdir / 'checkpoints' / str(newest)}" in job.said)
    job.wait_for(lambda: "compiling the step" in job.said.split("resuming from")[1])
    job.wait_for_step(len(before) + 1)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.said
    assert losses(job.workdir, last=len(before)) == before
    assert "process 0 of 2 cannot go on, most likely because another is gone" in job.said
    assert steps_on_disk(job.workdir)[-1] == job.step()  # SIGTERM to all: saved


@pytest.mark.slow
def test_killed_while_it_compiles(straight, tmp_path, cache):
    job = Job(tmp_path / "run", cache, "--restarts=1")
    job.wait_for(lambda: "compiling the step" in job.said)
    job.kill(1)
    _ends_like(job, straight)
    assert "process 1 ended by SIGKILL" in job.said


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_while_it_saves(straight, tmp_path, cache, rank):
    """Rank 0 writes the checksums, and is the coordinator."""
    job = Job(tmp_path / "run", cache, "--restarts=1")
    job.wait_for(lambda: any((job.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
    job.kill(rank)
    _ends_like(job, straight)
    assert "starting again" in job.said
    assert not list((job.workdir / "checkpoints").glob("*tmp*"))


@pytest.mark.slow
def test_the_coordinator_is_killed(straight, tmp_path, cache):
    job = Job(tmp_path / "run", cache, "--restarts=1")
    job.wait_for_step(3)
    job.kill(0)
    _ends_like(job, straight)
    assert "process 0 ended by SIGKILL" in job.said


@pytest.mark.slow
def test_a_stopped_process_is_named_in_time_and_the_others_leave(straight, tmp_path, cache):
    job = Job(tmp_path / "run", cache, "--restarts=1", train__watchdog_s=8.0)
    job.wait_for_step(3)
    job.kill(1, signal.SIGSTOP)
    began = time.monotonic()
    job.wait_for(lambda: "process 0 ended with exit code 75" in job.said)
    assert time.monotonic() - began < 3 * 8.0
    assert "process 1 has given no sign of life for 8 s (" in job.said
    _ends_like(job, straight)


@pytest.mark.slow
def test_sigterm_while_it_compiles_ends_it_at_once(tmp_path):
    job = Job(tmp_path / "run", tmp_path / "compiled", "--restarts=1")
    job.wait_for(lambda: "compiling the step" in job.said)
    job.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert job.end() == 0, job.said
    assert time.monotonic() - began < 10
    assert "nothing to save yet" in job.said and "starting again" not in job.said


@pytest.mark.slow
def test_a_workdir_in_use_is_refused_by_all_in_time(tmp_path, cache):
    """The first process alone finds it out."""
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "run.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        job = Job(tmp_path / "run", cache, "--restarts=1")
        job.wait_for(lambda: "is in use by process" in job.said)
        began = time.monotonic()
        assert job.end() == 2, job.said
        assert time.monotonic() - began < 20 and "starting again" not in job.said


@pytest.mark.slow
@pytest.mark.parametrize("to", ["one", "all"])
def test_asked_to_end_it_saves_and_ends_well(straight, tmp_path, cache, to):
    job = Job(tmp_path / "run", cache, "--restarts=1")
    job.wait_for_step(3)
    if to == "one":
        job.kill(1, signal.SIGTERM)
    else:
        job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.said
    assert steps_on_disk(job.workdir)[-1] == job.step() < LAST
    assert "starting again" not in job.said
    _ends_like(Job(job.workdir, cache), straight)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_the_checkpoints_before(straight, tmp_path, cache):
    job = Job(tmp_path / "run", cache, train__stop_at=4)
    assert job.end() == 0, job.said
    job = Job(job.workdir, cache, "--restarts=1", file_bytes=40_000)
    assert job.end() == 2, job.said
    assert "cannot be written" in job.said and "starting again" not in job.said
    assert steps_on_disk(job.workdir) == [2, 4]
    _ends_like(Job(job.workdir, cache), straight)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["room of process 0", "room of process 1", "a file in the way"])
def test_a_save_that_fails_in_one_process_ends_all_in_time(straight, tmp_path, cache, what):
    """The others wait for it inside Orbax, for five minutes if it only says why and ends."""
    job = Job(tmp_path / "run", cache, "--restarts=1", train__num_steps=ENDLESS)
    job.wait_for_step(5)
    if what == "a file in the way":
        shutil.rmtree(job.workdir / "checkpoints", ignore_errors=True)
        shutil.rmtree(job.workdir / "checkpoints", ignore_errors=True)
        (job.workdir / "checkpoints").write_text("no folder")
    else:
        resource.prlimit(job.ranks()[int(what[-1])], resource.RLIMIT_FSIZE, (40_000, 40_000))
    began = time.monotonic()
    assert job.end() == 2, job.said
    assert time.monotonic() - began < 60
    assert "cannot be written" in job.said and "starting again" not in job.said
    if what == "a file in the way":
        (job.workdir / "checkpoints").unlink()
    again = Job(job.workdir, cache, train__num_steps=max(LAST, job.step() + 2))
    assert again.end() == 0, again.said
    assert losses(again.workdir, last=LAST) == losses(straight)


def _read_only(folder: Path, on: bool) -> None:
    """For root, whom permissions do not stop, a file system of its own."""
    if os.geteuid():
        folder.chmod(0o555 if on else 0o755)
    else:
        option = "remount,ro" if on else "remount,rw"
        subprocess.run(["mount", "-o", option, folder], check=True)


@pytest.fixture
def own_folder(tmp_path):
    """A folder that can become read-only."""
    folder = tmp_path / "own"
    folder.mkdir()
    if not os.geteuid():
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    yield folder
    if not os.geteuid():
        subprocess.run(["umount", "-l", folder], check=True)
    else:
        folder.chmod(0o755)


@pytest.mark.slow
def test_a_folder_becomes_read_only(straight, tmp_path, own_folder, cache):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(own_folder, target_is_directory=True)
    job = Job(tmp_path / "run", cache, "--restarts=1", train__num_steps=ENDLESS)
    job.wait_for_step(5)
    while True:  # a file that is open for writing keeps it from becoming read-only
        try:
            _read_only(own_folder, True)
            break
        except subprocess.CalledProcessError:
            time.sleep(0.01)
    assert job.end() == 2, job.said
    assert "cannot be written" in job.said and "starting again" not in job.said
    _read_only(own_folder, False)
    again = Job(tmp_path / "run", cache, train__num_steps=max(LAST, job.step() + 2))
    assert again.end() == 0, again.said
    assert losses(again.workdir, last=LAST) == losses(straight)


@pytest.mark.slow
def test_the_folder_of_checkpoints_is_deleted(straight, tmp_path, cache):
    """The next save makes it anew: nothing is lost but the way back."""
    job = Job(tmp_path / "run", cache, "--restarts=1", train__num_steps=ENDLESS)
    job.wait_for_step(3)
    shutil.rmtree(job.workdir / "checkpoints", ignore_errors=True)
    gone_at = job.step()
    job.wait_for(lambda: (job.workdir / "checkpoints").is_dir())
    job.wait_for(lambda: bool(steps_on_disk(job.workdir)) and job.step() > gone_at + 6)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 0, job.said
    again = Job(job.workdir, cache, train__num_steps=max(LAST, job.step() + 2))
    assert again.end() == 0, again.said
    assert losses(again.workdir, last=LAST) == losses(straight)


_JUMP = """
import itertools, time
real, calls = time.time, itertools.count()
# A day ahead, then a day back, then right, as a clock that is set while the run goes on.
time.time = lambda: real() + (0, 86_400, -86_400)[next(calls) // 50 % 3]
"""


@pytest.mark.slow
def test_the_clock_jumps(straight, tmp_path, cache):
    (tmp_path / "sitecustomize.py").write_text(_JUMP)
    job = Job(tmp_path / "run", cache, env={"PYTHONPATH": str(tmp_path)}, train__watchdog_s=20.0)
    _ends_like(job, straight)
    assert "no sign of life" not in job.said


def _killed_often(kills: int, workdir: Path, cache: Path, seed: int) -> tuple[Job, list]:
    """A run that is killed at random moments, as it starts as much as in its steps.

    Returns:
      The job, and for each kill its time and the newest step before it.
    """
    moments, done = random.Random(seed), []
    job = Job(workdir, cache, f"--restarts={kills}", train__num_steps=10 * kills + 20)
    for number in range(kills):
        job.wait_for(lambda number=number: job.said.count("starting again") == number)
        job.wait_for(lambda: len(job.ranks()) == 2)
        if moments.random() < 0.3:
            time.sleep(moments.uniform(0, 15))
        else:
            begun, more = job.step(), moments.randint(1, 9)
            job.wait_for(lambda begun=begun, more=more: job.step() >= begun + more)
            time.sleep(moments.uniform(0, 0.3))
        done.append((time.time(), job.step()))
        job.kill(moments.randrange(2))
        job.wait_for(lambda number=number: job.said.count("starting again") == number + 1)
    return job, done


@pytest.mark.slow
@pytest.mark.parametrize("kills", [3, 20])
def test_killed_again_and_again_it_is_one_curve(tmp_path, cache, kills):
    """With `-s` it prints goodput, and the seconds from each kill to the next step that was new."""
    job, done = _killed_often(kills, tmp_path / "run", cache, seed=kills)
    assert job.end() == 0, job.said
    steps = 10 * kills + 20
    times = {row["step"]: row["time"] for row in rows(job.workdir)}
    back = sorted(round(times[step + 1] - at, 1) for at, step in done)
    print(f"goodput {rows(job.workdir)[-1]['goodput']:.3f}, back after {back} s")
    undisturbed = Job(tmp_path / "straight", cache, train__num_steps=steps)
    assert undisturbed.end() == 0, undisturbed.said
    assert [row["step"] for row in rows(job.workdir)] == list(range(1, steps + 1))
    assert losses(job.workdir, last=steps) == losses(undisturbed.workdir, last=steps)
