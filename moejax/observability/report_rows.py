"""The lines of a run's metrics.jsonl, checked: whatever passes can be drawn."""

from __future__ import annotations

import math
import pathlib
from typing import Any

from moejax.config import ConfigError
from moejax.observability.loads import parsed_lines
from moejax.observability.report_plots import PANELS

Rows = list[dict[str, Any]]
# What is drawn: numbers, and numbers of every layer with experts.
_NUMBERS = (
    "loss", "eval_loss", "eval_nats_per_byte", "lr", "grad_norm", "tokens", "tokens_per_s",
    "goodput", "straggler",
)  # fmt: skip
_LISTS = ("moe_load_max", "dead_experts", *(name for panel in PANELS for name in panel.curves))


def read_rows(path: pathlib.Path) -> Rows:
    """Lines of a metrics.jsonl; the last one may be cut short, as a running process leaves it.

    Raises:
      ConfigError: there is no such file, no step in it, or a damaged line: what is drawn must be a
        number, or a list of numbers, or null.
    """
    rows: Rows = []
    try:
        for number, line, value in parsed_lines(path):
            if not isinstance(value, dict) and not line.endswith("\n"):
                break
            wrong = _wrong(value)
            if wrong:
                raise ConfigError(
                    f"{path}, line {number}, is damaged: {wrong}. Take the line out to draw the "
                    "rest."
                )
            rows.append(value)
    except OSError as error:
        raise ConfigError(
            f"no metrics at {path}: {error.strerror}. `moejax train` writes them."
        ) from error
    if not rows:
        raise ConfigError(f"{path} holds no step yet: nothing to draw.")
    return rows


def _wrong(row: Any) -> str:
    """What keeps a line of metrics from being drawn, or nothing."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return "it is no JSON mapping with a step"
    for name in ("step", *_NUMBERS):
        if not _is_number(row.get(name)):
            return f"{name} is no number"
    for name in _LISTS:
        values = row.get(name)
        if not (values is None or isinstance(values, list) and all(map(_is_number, values))):
            return f"{name} is no list of numbers"
    return ""


def _is_number(value: Any) -> bool:
    """Whether it is a finite number, or the null that stands for another one."""
    if value is None:
        return True
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False
