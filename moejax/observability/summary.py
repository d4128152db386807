"""The short report at the end of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import rich.console
import rich.table
import rich.text

from moejax.observability.console import Console
from moejax.observability.progress import short_count, short_time


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What the report tells; None leaves a line out.

    Attributes:
      workdir, config: as given on the command line.
      outcome: in words, such as "finished" or "stopped by SIGTERM".
      step, num_steps: reached, and asked for.
      tokens: trained on, over all parts of a resumed run.
      wall_s: seconds of this process.
      first_step_s: seconds to the end of its first step.
      cache: "cold", "warm" or "off": the compilation cache.
      checkpoint, best_checkpoint, picture: paths.
      overrides: `--config.FIELD=VALUE` of the command line, FIELD to VALUE.
    """

    workdir: str
    config: str
    outcome: str
    step: int
    num_steps: int
    loss: float | None = None
    eval_loss: float | None = None
    eval_nats_per_byte: float | None = None
    tokens: int | None = None
    tokens_per_s: int | float | None = None
    wall_s: int | float | None = None
    first_step_s: int | float | None = None
    cache: str | None = None
    peak_memory_bytes: int | None = None
    checkpoint: str | None = None
    best_checkpoint: str | None = None
    picture: str | None = None
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _rows(s: RunSummary) -> list[tuple[str, str]]:
    losses = _joined(
        (s.loss, lambda x: f"{x:.4f} training"),
        (s.eval_loss, lambda x: f"{x:.4f} validation"),
        (s.eval_nats_per_byte, lambda x: f"{x:.4f} nats/byte"),
    )
    tokens = _joined(
        (s.tokens, short_count), (s.tokens_per_s, lambda x: f"{short_count(x)} a second")
    )
    times = _joined(
        (s.wall_s, short_time),
        (s.first_step_s, lambda x: f"{short_time(x)} to the first step"),
        (s.cache, lambda x: f"compilation cache {x}"),
    )
    rows = [
        ("steps", f"{s.step}/{s.num_steps}"),
        ("loss", losses),
        ("tokens", tokens),
        ("time", times),
        ("peak memory", _joined((s.peak_memory_bytes, short_bytes))),
        ("checkpoint", s.checkpoint or "none"),
        ("best", s.best_checkpoint or ""),
        ("picture", s.picture or ""),
    ]
    return [(name, text) for name, text in rows if text]


def short_bytes(number: int | float) -> str:
    """Bytes a device in GiB, in MiB below one."""
    gib = number / 2**30
    return f"{gib:.2f} GiB a device" if gib >= 1 else f"{1024 * gib:.1f} MiB a device"


def _joined(*parts: tuple[Any, Callable[[Any], str]]) -> str:
    return ", ".join(show(value) for value, show in parts if value is not None)


def next_commands(s: RunSummary) -> list[str]:
    """Commands worth trying now, ready to paste; they repeat the values this run was given."""
    given = dict(s.overrides)
    if s.step >= s.num_steps:
        given["train.num_steps"] = str(2 * s.num_steps)
    workdir = f"--workdir={shlex.quote(s.workdir)}"
    values = [shlex.quote(f"--config.{name}={value}") for name, value in given.items()]
    train = ["moejax train", f"--config={shlex.quote(s.config)}", workdir, *values]
    commands = [" ".join(train), f"moejax config --config={shlex.quote(s.config)}"]
    return [f"moejax eval {workdir}", *commands] if s.checkpoint else commands


def print_summary(summary: RunSummary, console: rich.console.Console | None = None) -> None:
    """Prints the report; plain text where the output is no terminal."""
    console = console or Console()
    table = rich.table.Table(
        box=None, show_header=False, padding=(0, 2, 0, 0), title=None, highlight=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(summary):
        table.add_row(name, rich.text.Text(text))
    console.print(
        f"{summary.workdir}: {summary.outcome}", style="bold", markup=False, soft_wrap=True
    )
    console.print(table)
    console.print("next:", style="dim")
    for command in next_commands(summary):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
