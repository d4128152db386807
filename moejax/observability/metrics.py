"""Metrics as JSON lines, one line a step, and the count of experts that no token visits."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.config import ConfigError

FILE = "metrics.jsonl"


def plain(value: Any) -> Any:
    """A metric in JSON types: arrays as lists, NaN and infinity as None.

    Args:
      value: number, string, None, or a numpy or jax array of any rank (rank 0 is a number).
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    array = np.asarray(value)
    # bfloat16 has no JSON form of its own; float32 holds it exactly.
    listed = array.astype(np.float32) if array.dtype.kind == "V" else array
    return plain(listed.tolist())


def unwritable(path: pathlib.Path, error: OSError) -> ConfigError:
    """The one line for a place that takes no files."""
    reason = error.strerror or str(error)
    return ConfigError(f"workdir cannot be written: {path}: {reason}. Choose another --workdir.")


def read_metrics(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """Lines of a `metrics.jsonl`, or of the one in a workdir, as dictionaries.

    A line cut short, by a full disk or a killed process, is left out.

    Raises:
      ConfigError: there is no such file.
    """
    path = pathlib.Path(path)
    path = path / FILE if path.is_dir() else path
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"no metrics at {path}: {error.strerror}.") from error
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


class MetricsLog:
    """Appends JSON lines to `<workdir>/metrics.jsonl`, one a step, or to another file there."""

    def __init__(
        self, workdir: str | pathlib.Path, *, first_step: int | None = None, file: str = FILE
    ):
        """
        Args:
          workdir: made if it is missing.
          first_step: the first step that will be written; lines of that step and later ones,
            left by the run that is being resumed, are removed. None starts from an empty file.
          file: its name.
        Raises:
          ConfigError: the file cannot be written.
        """
        self.path = pathlib.Path(workdir) / file
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._drop_from(0 if first_step is None else first_step)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise unwritable(self.path, error) from error

    def _drop_from(self, first_step: int) -> None:
        if not self.path.exists():
            return
        kept = [row for row in read_metrics(self.path) if row["step"] < first_step]
        scratch = self.path.with_name(f"{self.path.name}.tmp")
        scratch.write_text("".join(f"{json.dumps(row)}\n" for row in kept), encoding="utf-8")
        os.replace(scratch, self.path)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Writes the line of a step and hands it to the system at once.

        Raises:
          ConfigError: the disk is full, or gone.
        """
        row = {"step": int(step)} | {name: plain(value) for name, value in metrics.items()}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self.path, error) from error

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class DeadExperts:
    """Counts, in each layer, the experts that got no token in the last `window` steps.

    No expert counts as dead before `window` steps were seen. A resumed run starts a new window.
    """

    def __init__(self, num_layers: int, num_experts: int, window: int = 100):
        self._window = window
        self._first: int | None = None
        self._last_seen_LE = np.zeros((num_layers, num_experts), np.int64)

    def update(self, step: int, load_LE: Any) -> np.ndarray:
        """Takes the tokens each expert of each layer got in a step.

        Args:
          step: number of the step; steps may be left out, they then count as without tokens.
          load_LE: [layers, experts], any number type; more than 0 means visited.
        Returns:
          int64 [layers]: dead experts of each layer.
        """
        load_LE = np.asarray(load_LE)
        if load_LE.shape != self._last_seen_LE.shape:
            raise ValueError(
                f"load has shape {load_LE.shape}; it must be {self._last_seen_LE.shape}, "
                "(layers, experts)."
            )
        if self._first is None:
            self._first = step
            self._last_seen_LE[:] = step - 1
        self._last_seen_LE[load_LE > 0] = step
        return np.sum(step - self._last_seen_LE >= self._window, axis=1)
