"""Goodput over restarts, and which process is late: with clocks of our own."""

import json

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.observability import Goodput
from moejax.observability.goodput import describe_goodput, num_starts, process_start, read_starts
from moejax.train.pace import Pace, pace_row


class Clock:
    def __init__(self, now: float = 1000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_steps_that_were_lost_and_time_without_a_process_are_no_goodput(tmp_path):
    clock = Clock()
    first = Goodput(tmp_path, step=0, began=1000.0, clock=clock)
    clock.now = 1010  # compiled
    for _ in range(10):
        clock.now += 2
        first.add(2.0)
    saved = first.productive_s
    assert first.row() == {"time": 1030, "productive_s": 20.0, "goodput": 20 / 30}
    for _ in range(5):  # lost with the process
        clock.now += 2
        first.add(2.0)
    clock.now = 1060
    second = Goodput(tmp_path, step=10, productive_s=saved, began=1055.0, clock=clock)
    clock.now = 1080
    second.add(20.0)
    assert second.row()["goodput"] == 40 / 80
    assert second.num_starts == 2
    assert [start["step"] for start in read_starts(tmp_path)] == [0, 10]


def test_a_run_that_goes_on_counts_the_steps_it_has_kept(tmp_path):
    rows = [{"step": step, "productive_s": 2.0 * step} for step in range(1, 9)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert Goodput.of_run(tmp_path, 5).productive_s == 10.0
    assert Goodput.of_run(tmp_path, 0).productive_s == 0.0


def test_a_damaged_line_and_a_clock_that_jumped_do_not_end_the_run(tmp_path):
    (tmp_path / "starts.jsonl").write_text('{"time": 5000.0, "step": 0}\n{"time": 50')
    goodput = Goodput(tmp_path, step=3, began=4000.0, clock=Clock(4001.0))
    assert goodput.row()["goodput"] is None and goodput.num_starts == 2
    assert describe_goodput(None, 2) is None
    assert describe_goodput(0.5, 1) == "50.0 % of the time, 1 start"


def test_going_back_inside_a_process_is_no_start(tmp_path):
    for step in (0, 4):
        Goodput(tmp_path, step=step)
    assert num_starts(read_starts(tmp_path)) == 1
    assert 0 < process_start() - 1.7e9


def test_a_place_that_takes_no_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Goodput(tmp_path / "file", step=0)


def test_a_lap_is_what_is_not_spent_on_the_devices():
    clock = Clock(0.0)
    pace = Pace(clock)
    with pace.waiting("data"):
        clock.now += 3
    clock.now += 1
    with pace.waiting("devices"):
        clock.now += 10
    assert pace.lap() == (4.0, 3.0)
    clock.now += 2
    pace.restart()
    assert pace.lap() == (0.0, 0.0)


def test_the_late_process_is_named():
    even = np.array([[0.01, 0.0], [0.02, 0.0], [0.01, 0.0]], np.float32)
    row = pace_row(even, step_s=0.05)
    assert row["straggler"] is None  # a hundredth of a second is nothing
    late = even + np.array([[0, 0], [0, 0], [0.2, 0.15]], np.float32)
    row = pace_row(late, step_s=0.5)
    assert row["straggler"] == 2
    assert row["busy_s"] == pytest.approx(0.21) and row["data_s"] == pytest.approx(0.15)
    assert row["rank_busy_s"] == pytest.approx([0.01, 0.02, 0.21])
    assert pace_row(late, step_s=5.0)["straggler"] is None  # 4 % of a step
    assert set(pace_row(even[:1], 0.05)) == {"busy_s", "data_s"}
    many = pace_row(np.tile(late, (50, 1)), 0.5)
    assert "rank_busy_s" not in many and json.dumps(many)
