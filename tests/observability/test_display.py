"""Progress and summary on a terminal, in a file and in a pipe that nobody reads."""

import io
import subprocess
import sys

import pytest
import rich.console

from moejax.observability import Progress, RunSummary, print_summary

METRICS = {"loss": 2.34567, "tokens_per_s": 14100.0, "moe_load_max": [1.2, 1.84, None]}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _run(console, steps=100, step_s=1.0, **options):
    clock = Clock()
    with Progress(steps, console=console, clock=clock, **options) as progress:
        for step in range(1, steps + 1):
            clock.now += step_s
            progress.update(step, METRICS)
        progress.print("saved [bold] 100")
    return console.file.getvalue()


def test_plain_lines_are_few_short_and_complete():
    lines = _run(rich.console.Console(file=io.StringIO())).splitlines()
    assert lines[0] == "step 1/100  loss 2.3457  14.1k tok/s  expert load 1.8x"
    assert lines[1].startswith("step 11/100") and lines[1].endswith("1m29s left")
    assert [line.split()[1] for line in lines[:-1]] == [
        *(f"{n}/100" for n in range(1, 100, 10)),
        "100/100",
    ]
    assert lines[-1] == "saved [bold] 100" and max(map(len, lines)) < 80


def test_terminal_gets_a_bar():
    console = rich.console.Console(file=io.StringIO(), force_terminal=True, width=100)
    out = _run(console)
    assert "━" in out and "100/100" in out and "loss 2.3457" in out and "saved [bold] 100" in out


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_says_only_what_is_printed(terminal):
    console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, no_color=True)
    assert _run(console, enabled=False).strip() == "saved [bold] 100"


def test_missing_metrics_are_left_out():
    console = rich.console.Console(file=io.StringIO())
    with Progress(5, console=console) as progress:
        progress.update(1, {"loss": float("nan")})
    assert console.file.getvalue().strip() == "step 1/5"


_PIPED = """
from moejax.observability import Progress, RunSummary, print_summary
with Progress(20000, line_every_s=0) as progress:
    for step in range(1, 20001):
        progress.update(step, {"loss": 1.0})
print_summary(RunSummary(workdir="w", config="c", outcome="finished", step=1, num_steps=1))
open(__import__("sys").argv[1], "w").write("done")
"""


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    done = tmp_path / "done"
    command = [sys.executable, "-c", _PIPED, str(done)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline().startswith(b"step 1/20000")
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.wait(timeout=60), errors, done.read_text()) == (0, b"", "done")


FULL = RunSummary(
    workdir="runs/my run",
    config="configs/tiny.py",
    outcome="finished",
    step=400,
    num_steps=400,
    loss=2.5,
    eval_loss=2.61,
    eval_nats_per_byte=1.45,
    tokens=3_276_800,
    tokens_per_s=14100.0,
    wall_s=284.1,
    first_step_s=31.2,
    cache="warm",
    peak_memory_bytes=3 << 29,
    checkpoint="runs/my run/checkpoints/400",
    best_checkpoint="runs/my run/checkpoints/300",
    picture="runs/my run/curves.png",
    overrides={"data.paths": "('a b.txt',)", "train.num_steps": "400"},
    program=".venv/bin/moejax",
    devices=("--devices=8",),
)


def _summary(summary):
    console = rich.console.Console(file=io.StringIO(), width=100)
    print_summary(summary, console)
    return console.file.getvalue().splitlines()


def test_summary_of_a_finished_run():
    assert _summary(FULL) == [
        "runs/my run: finished",
        "steps        400/400",
        "loss         2.5000 training, 2.6100 validation, 1.4500 nats/byte",
        "tokens       3.28M, 14.1k a second",
        "time         4m44s, 31s to the first step, compilation cache warm",
        "peak memory  1.50 GiB a device",
        "checkpoint   runs/my run/checkpoints/400",
        "best         runs/my run/checkpoints/300",
        "picture      runs/my run/curves.png",
        "next:",
        "  .venv/bin/moejax eval --workdir='runs/my run' --devices=8",
        "  .venv/bin/moejax train --config=configs/tiny.py --workdir='runs/my run' --devices=8"
        """ '--config.data.paths=('"'"'a b.txt'"'"',)' --config.train.num_steps=800""",
        "  .venv/bin/moejax config --config=configs/tiny.py --devices=8"
        """ '--config.data.paths=('"'"'a b.txt'"'"',)' --config.train.num_steps=400""",
    ]


def test_summary_of_a_run_stopped_early_tells_how_to_resume():
    stopped = RunSummary(
        workdir="w", config="tiny", outcome="stopped by SIGTERM", step=7, num_steps=400, loss=0.0
    )
    assert _summary(stopped) == [
        "w: stopped by SIGTERM",
        "steps       7/400",
        "loss        0.0000 training",
        "checkpoint  none",
        "next:",
        "  moejax train --config=tiny --workdir=w",
        "  moejax config --config=tiny",
    ]
