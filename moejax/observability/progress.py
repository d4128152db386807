"""How far the run is: a live bar on a terminal, a short line now and then anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import rich.console
import rich.progress

from moejax.observability.console import Console
from moejax.observability.metrics import plain


class Progress:
    """Shows step, loss, tokens/s, time left and the load of the busiest expert over the mean.

    Use as a context manager. On a terminal it draws a bar; elsewhere it prints at most one line
    every `line_every_s`, and the last step. When the reader of a pipe goes away it falls silent
    and the run goes on.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        first_step: int = 0,
        enabled: bool = True,
        silent: bool = False,
        line_every_s: int | float = 10.0,
        console: rich.console.Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """
        Args:
          num_steps: the last step's number.
          first_step: steps already done when this run started.
          enabled: False shows nothing (messages of `print` still come).
          silent: shows nothing at all, as all processes of a run but the first.
          line_every_s: least seconds between plain lines.
          console: where to; None is the standard output.
          clock: seconds, from any origin.
        """
        self._console = console or Console()
        self._num_steps, self._step = num_steps, first_step
        self._enabled, self._silent = enabled and not silent, silent
        self._line_every_s, self._clock = line_every_s, clock
        self._started: tuple[int, float] | None = None
        self._last_line_s = -float("inf")
        self._bar = self._make_bar() if self._enabled and self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=num_steps, completed=first_step, text="")

    def _make_bar(self) -> rich.progress.Progress:
        return rich.progress.Progress(
            rich.progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(bar_width=24),
            rich.progress.TextColumn("{task.fields[text]}"),
            console=self._console,
            transient=True,
        )

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a finished step and its metrics; those that are missing are not shown.

        Args:
          step: number of the step.
          metrics: `loss`, `tokens_per_s`, and `moe_load_max` as a multiple of the mean load
            (a number, or one a layer, of which the largest is shown).
        """
        now = self._clock()
        # The first step compiles: time left is reckoned from its end.
        self._started = self._started or (step, now)
        self._step = step
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=self._describe(now, metrics))
        elif now - self._last_line_s >= self._line_every_s or step >= self._num_steps:
            self._last_line_s = now
            self.print(f"step {step}/{self._num_steps}  {self._describe(now, metrics)}")

    def _describe(self, now: float, metrics: Mapping[str, Any]) -> str:
        values = {name: plain(metrics.get(name)) for name in ("loss", "tokens_per_s")}
        parts = []
        if values["loss"] is not None:
            parts.append(f"loss {values['loss']:.4f}")
        if values["tokens_per_s"] is not None:
            parts.append(f"{short_count(values['tokens_per_s'])} tok/s")
        load = plain(metrics.get("moe_load_max"))
        loads = [x for x in (load if isinstance(load, list) else [load]) if x is not None]
        if loads:
            parts.append(f"expert load {max(loads):.1f}x")
        left_s = self._left_s(now)
        if left_s is not None:
            parts.append(f"{short_time(left_s)} left")
        return "  ".join(parts)

    def _left_s(self, now: float) -> float | None:
        assert self._started is not None
        first, then = self._started
        done = self._step - first
        return (now - then) / done * (self._num_steps - self._step) if done > 0 else None

    def print(self, line: str) -> None:
        """Prints a line, above the bar where there is one."""
        if self._silent:
            return
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


def short_count(number: int | float) -> str:
    """1234567 as 1.23M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g}{unit}"
    return f"{number:.3g}"


def short_time(seconds: int | float) -> str:
    """Seconds as 4.2s, 3m05s or 2h03m."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest}s"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"
