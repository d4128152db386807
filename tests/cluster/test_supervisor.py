"""Processes started together: their output, their exit codes, their end."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from moejax.cluster import Membership, Supervisor, local, membership
from moejax.config import ConfigError


def _command(body: str) -> list[str]:
    """A program that knows its number as `me`."""
    head = "import os, signal, sys, time\nme = int(os.environ['MOEJAX_PROCESS_ID'])\n"
    return [sys.executable, "-c", head + textwrap.dedent(body)]


def _run(body: str, processes: int = 3, **options) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = Supervisor(_command(body), processes, say=lines.append, **options).run()
    return code, lines


def test_all_that_end_well_are_0():
    assert _run("sys.exit(0)") == (0, [])


def test_each_learns_its_place(tmp_path):
    body = "print(os.environ['MOEJAX_COORDINATOR'], os.environ['MOEJAX_NUM_PROCESSES'], me)"
    assert _run(body, logs=tmp_path)[0] == 0
    places = [(tmp_path / f"process-{n:05d}.log").read_text().split() for n in range(3)]
    assert [place[1:] for place in places] == [["3", "0"], ["3", "1"], ["3", "2"]]
    assert len({place[0] for place in places}) == 1


def test_the_first_failure_is_the_exit_code_and_ends_the_others():
    began = time.monotonic()
    code, lines = _run("if me == 1: sys.exit(7)\ntime.sleep(60)")
    assert code == 7
    assert lines == ["process 1 ended with exit code 7; ending the others"]
    assert time.monotonic() - began < 30


def test_a_killed_process_counts_as_its_signal():
    code, lines = _run("if me == 2: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)")
    assert code == 128 + signal.SIGKILL
    assert "process 2 ended by SIGKILL" in lines[0]


def test_when_all_end_before_it_looks_the_first_failure_is_named(monkeypatch):
    monkeypatch.setattr(local, "_POLL_S", 5.0)
    said = ["process 1 ended with exit code 9"]
    assert _run("time.sleep(1); sys.exit(75 if me == 0 else 9)", 2) == (9, said)


def test_one_that_will_not_end_is_killed_after_the_grace_time():
    body = """
    if me == 0:
        time.sleep(2)  # the other is ready then
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
    """
    code, lines = _run(body, processes=2, grace_s=0.5)
    assert code == 3
    assert lines[-1] == "1 processes did not end in 0.5 s: killed"


def test_lines_of_the_others_carry_their_number(tmp_path, capfd):
    body = "print('out', me, flush=True)\nprint('err', me, file=sys.stderr, flush=True)"
    assert _run(body, processes=2, logs=tmp_path)[0] == 0
    out, err = capfd.readouterr()
    assert out.splitlines() == ["out 0"]  # what the others print is in their logs
    assert sorted(err.splitlines()) == ["[1] err 1", "err 0"]
    kept = (tmp_path / "process-00001.log").read_text().splitlines()
    assert sorted(kept) == ["err 1", "out 1"]


def test_a_second_job_writes_behind_the_logs_of_the_first(tmp_path):
    for word in ("first", "second"):
        assert _run(f"print({word!r})", processes=1, logs=tmp_path)[0] == 0
    assert (tmp_path / "process-00000.log").read_text().split() == ["first", "second"]


def test_a_signal_reaches_all_and_is_waited_for(tmp_path):
    body = """
    import pathlib
    def leave(*_):
        pathlib.Path(os.environ['OUT'], str(me)).touch()
        sys.exit(0)
    signal.signal(signal.SIGTERM, leave)
    pathlib.Path(os.environ['OUT'], f'ready{me}').touch()
    time.sleep(60)
    """
    script = textwrap.dedent(f"""
        import sys
        from moejax.cluster import Supervisor
        sys.exit(Supervisor({_command(body)!r}, 2).run())
    """)
    env = os.environ | {"OUT": str(tmp_path)}
    job = subprocess.Popen([sys.executable, "-c", script], env=env)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{n}").exists() for n in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 0
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_a_wish_for_a_trace_reaches_all_and_ends_none(tmp_path):
    body = """
    import pathlib
    here = pathlib.Path(os.environ['OUT'])
    if me == 0:
        os.kill(os.getppid(), signal.SIGUSR1)  # the other still starts, or waits
        time.sleep(0.5)
        (here / 'early').touch()
    signal.signal(signal.SIGUSR1, lambda *_: (here / str(me)).touch())
    (here / f'ready{me}').touch()
    while not all((here / f'ready{n}').exists() for n in range(2)) or not (here / 'early').exists():
        time.sleep(0.05)
    if me == 0:
        os.kill(os.getppid(), signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while not all((here / str(n)).exists() for n in range(2)) and time.monotonic() < deadline:
        time.sleep(0.05)
    """
    script = "import sys\nfrom moejax.cluster import Supervisor\n"
    script += f"sys.exit(Supervisor({_command(body)!r}, 2).run())"
    env = os.environ | {"OUT": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", script], env=env, timeout=100).returncode == 0
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_a_place_in_the_environment():
    place = Membership("host:1234", 4, 2)
    assert membership(place.as_env()) == place
    assert membership({}) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"MOEJAX_PROCESS_ID": ""}, "without MOEJAX_PROCESS_ID"),
        ({"MOEJAX_PROCESS_ID": "4"}, "another number from 0 below it"),
        ({"MOEJAX_NUM_PROCESSES": "many"}, "give a number of processes"),
    ],
)
def test_half_a_place_is_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        membership(Membership("host:1234", 4, 2).as_env() | changes)
