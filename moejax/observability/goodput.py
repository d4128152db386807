"""Which share of a run's time, over all its starts, went into steps that it has kept."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from moejax.observability.metrics import FILE as METRICS
from moejax.observability.metrics import read_metrics, unwritable

FILE = "starts.jsonl"


@functools.cache
def process_start() -> float:
    """When this process began, as time.time() counts; where the system does not tell, now."""
    try:
        fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        up_s = float(pathlib.Path("/proc/uptime").read_text().split()[0])
        return time.time() - up_s + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()


def read_starts(workdir: str | pathlib.Path) -> list[dict[str, Any]]:
    """The starts of a run: `time` since 1970, and `step`, done before. Damaged: skipped."""
    path = pathlib.Path(workdir) / FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    starts = []
    for line in lines:
        try:
            start = json.loads(line)
            starts.append({"time": float(start["time"]), "step": int(start["step"])})
        except (ValueError, KeyError, TypeError):  # the disk was full, or the process killed
            continue
    return starts


def num_starts(starts: list[dict[str, Any]]) -> int:
    """Of processes: one that went back to a checkpoint by itself has a line for that too."""
    return len({start["time"] for start in starts})


class Goodput:
    """Seconds in steps that count, over the seconds since a run's first start.

    What is not in them: starting and compiling, evaluating and saving, steps that were lost with a
    process and made again, and the time in which nothing ran. A line of metrics has the seconds up
    to its step, so that those of lost steps are gone after a restart.
    """

    def __init__(
        self, workdir: str | pathlib.Path, *, step: int, productive_s: float = 0.0,
        began: float | None = None, clock: Callable[[], float] = time.time,
    ):  # fmt: skip
        """
        Args:
          workdir: `starts.jsonl` there gets a line for this start.
          step: steps done before.
          productive_s: what the line of that step says.
          began: when this start began; None = this process.
          clock: seconds since 1970.
        Raises:
          ConfigError: the file cannot be written.
        """
        path = pathlib.Path(workdir) / FILE
        began = process_start() if began is None else began
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            cut = path.exists() and not path.read_bytes().endswith(b"\n")
            with path.open("a", encoding="utf-8") as file:
                line = json.dumps({"time": round(began, 3), "step": step})
                file.write(("\n" if cut else "") + line + "\n")
        except OSError as error:
            raise unwritable(path, error) from error
        starts = read_starts(workdir)
        self.num_starts, self._first = num_starts(starts), starts[0]["time"]
        self.productive_s, self._clock = productive_s, clock

    @classmethod
    def of_run(cls, workdir: str | pathlib.Path, step: int) -> Goodput:
        """Of a run that goes on behind a step, with the seconds its metrics have up to there."""
        rows = read_metrics(workdir) if (pathlib.Path(workdir) / METRICS).exists() else []
        kept = [row.get("productive_s") for row in rows if row["step"] <= step]
        spent = kept[-1] if kept and isinstance(kept[-1], int | float) else 0.0
        return cls(workdir, step=step, productive_s=spent)

    def add(self, step_s: float) -> None:
        """A step was made."""
        self.productive_s += step_s

    def row(self) -> dict[str, Any]:
        """For a line of metrics: `time`, `productive_s`, and `goodput`, None if a clock jumped."""
        now = self._clock()
        share = self.productive_s / (now - self._first) if now > self._first else None
        return {"time": now, "productive_s": self.productive_s, "goodput": share}


def describe_goodput(share: float | None, starts: int) -> str | None:
    """The share in words; None where it is not known."""
    if share is None:
        return None
    return f"{100 * share:.1f} % of the time, {starts} start{'s' * (starts != 1)}"
