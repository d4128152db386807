"""The short report at the end of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console
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
      eval_sets: loss a token and nats a byte of each set evaluated beside the validation split.
      tokens: trained on, over all parts of a resumed run.
      wall_s: seconds of this process.
      first_step_s: seconds to the end of its first step.
      goodput: share of the time since the first start that went into steps, in words.
      cache: "cold", "warm" or "off": the compilation cache.
      checkpoint, best_checkpoint, picture: paths.
      overrides: `--config.FIELD=VALUE` of the command line, FIELD to VALUE.
      program: what a shell calls the command by.
      devices: options that give the proposed commands the devices of this run.
    """

    workdir: str
    config: str
    outcome: str
    step: int
    num_steps: int
    loss: float | None = None
    eval_loss: float | None = None
    eval_nats_per_byte: float | None = None
    eval_sets: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    tokens: int | None = None
    tokens_per_s: int | float | None = None
    wall_s: int | float | None = None
    first_step_s: int | float | None = None
    goodput: str | None = None
    cache: str | None = None
    peak_memory_bytes: int | None = None
    checkpoint: str | None = None
    best_checkpoint: str | None = None
    picture: str | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    program: str = "moejax"
    devices: Sequence[str] = ()


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
        *((f"  {name}", f"{a:.4f}, {b:.4f} nats/byte") for name, (a, b) in s.eval_sets.items()),
        ("tokens", tokens),
        ("time", times),
        ("goodput", s.goodput or ""),
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
    more = {"train.num_steps": 2 * s.num_steps} if s.step >= s.num_steps else {}
    workdir, config = f"--workdir={shlex.quote(s.workdir)}", f"--config={shlex.quote(s.config)}"
    simulated = [option for option in s.devices if option.startswith("--devices=")]
    commands = [
        ["train", config, workdir, *s.devices, *_fields({**s.overrides, **more})],
        ["config", config, *simulated, *_fields(s.overrides)],
    ]
    if s.checkpoint:
        commands.insert(0, ["eval", workdir, *s.devices])
    return [" ".join([s.program, *words]) for words in commands]


def _fields(values: Mapping[str, Any]) -> list[str]:
    return [shlex.quote(f"--config.{name}={value}") for name, value in values.items()]


def print_summary(summary: RunSummary, console: rich.console.Console | None = None) -> None:
    """Prints the report; plain text where the output is no terminal."""
    console = console or Console()
    rows = _rows(summary)
    width = max(len(name) for name, _ in rows)
    console.print(
        f"{summary.workdir}: {summary.outcome}", style="bold", markup=False, soft_wrap=True
    )
    for name, text in rows:
        line = rich.text.Text.assemble((f"{name:{width}}", "dim"), f"  {text}")
        console.print(line, soft_wrap=True)
    console.print("next:", style="dim")
    for command in next_commands(summary):
        console.print(f"  {command}", markup=False, highlight=False, soft_wrap=True)
