"""A run as pictures and one page: loss, speed, load of every expert, dead experts, exchange."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.observability.loads import LOADS_FILE, Loads, parsed_lines, read_loads, relative
from moejax.observability.metrics import FILE, unwritable
from moejax.observability.progress import short_count
from moejax.observability.report_page import Section, page
from moejax.observability.report_plots import (
    Period,
    draw_balance,
    draw_exchange,
    draw_experts,
    draw_training,
    recorded,
)

PAGE, PICTURES = "report.html", "report"
Rows = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class DeadExpert:
    """An expert without a token in the window; `last_step` ends the record that had its last one.

    `last_step` is None where no record has any.
    """

    layer: int
    expert: int
    last_step: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What was written, and what it says.

    Attributes:
      page: the HTML file.
      pictures: the PNG files.
      facts: (name, value) pairs in words.
      dead: experts without a token in the window, None where no loads were recorded.
      window: (first, last) step that the dead experts were looked for in.
    """

    page: pathlib.Path
    pictures: list[pathlib.Path]
    facts: list[tuple[str, str]]
    dead: list[DeadExpert] | None
    window: tuple[int, int] | None


def write_report(
    workdir: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    window: int = 100,
) -> Report:
    """Draws a run: `report.html`, and the pictures in `report/`.

    Args:
      workdir: the run's folder.
      out: folder to write to; the workdir where it is None.
      window: steps at the end of the run that the map and the list of dead experts are about.
    Raises:
      ConfigError: no such folder, no metrics in it, a damaged line in a file, or a place that
        takes no files.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise ConfigError(f"workdir {workdir} is not a folder; give the one that a run wrote.")
    rows = _metrics(workdir / FILE)
    loads = read_loads(workdir) if (workdir / LOADS_FILE).exists() else None
    out = pathlib.Path(out) if out is not None else workdir
    folder = out / PICTURES
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    dead, seen = None, None
    if loads is not None:
        dead, seen = dead_experts(loads, window), _window(loads, window)
    facts = list(_facts(workdir, rows, loads, dead))
    sections = list(_sections(folder, rows, loads, window, dead))
    text = page(workdir.resolve().name, str(workdir), facts, sections)
    scratch = out / f"{PAGE}.tmp"
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, out / PAGE)
    except OSError as error:
        raise unwritable(out / PAGE, error) from error
    pictures = [section.picture for section in sections if section.picture is not None]
    return Report(out / PAGE, pictures, facts, dead, seen)


def _metrics(path: pathlib.Path) -> Rows:
    """Lines of metrics.jsonl; the last one may be cut short, as a running process leaves it."""
    rows: Rows = []
    try:
        for number, line, value in parsed_lines(path):
            if isinstance(value, dict) and type(value.get("step")) is int:
                rows.append(value)
            elif line.endswith("\n"):
                raise ConfigError(
                    f"{path}, line {number}, is damaged: it is no JSON mapping with a step. Take "
                    "the line out to draw the rest."
                )
    except OSError as error:
        raise ConfigError(
            f"no metrics at {path}: {error.strerror}. `moejax train` writes them."
        ) from error
    if not rows:
        raise ConfigError(f"{path} holds no step yet: nothing to draw.")
    return rows


def _window(loads: Loads, num_steps: int) -> tuple[int, int]:
    """First and last step of the records that `Loads.last` sums."""
    newest = loads.steps > loads.steps[-1] - num_steps
    return int(loads.first[newest][0]), int(loads.steps[-1])


def dead_experts(loads: Loads, num_steps: int) -> list[DeadExpert]:
    """Experts without a token in the newest records of at least `num_steps` steps."""
    out = []
    for layer, expert in np.argwhere(loads.last(num_steps) == 0):
        had = np.flatnonzero(loads.counts[:, layer, expert])
        last = int(loads.steps[had[-1]]) if len(had) else None
        out.append(DeadExpert(loads.layers[layer], int(expert), last))
    return out


def _sections(
    folder: pathlib.Path, rows: Rows, loads: Loads | None, window: int,
    dead: list[DeadExpert] | None,
) -> Iterator[Section]:  # fmt: skip
    yield Section("Training", picture=draw_training(rows, folder / "training.png"))
    if loads is not None and dead is not None:
        first, last = _window(loads, window)
        periods = [Period(first, last, loads.last(window))]
        if loads.steps[0] < first:
            begun = Period(int(loads.first[0]), int(loads.steps[0]), loads.counts[0])
            periods.insert(0, begun)
        text = (
            "Tokens of each expert over the mean of its layer: 1 is even, red is busy, blue is "
            "idle, black got no token."
        )
        picture = draw_experts(periods, loads.layers, folder / "experts.png")
        yield Section("Experts", text, picture)
        yield _dead_section(dead, first, last)
    if loads is not None or any(r.get("moe_load_max") for r in rows):
        yield Section("Balance", picture=draw_balance(rows, loads, folder / "balance.png"))
    else:
        yield Section("Experts", "This run recorded no loads: it has no layer with experts.")
    if recorded(rows):
        text = (
            "A round moves what fits the buffers; more than one means that some device got more "
            "than its buffer holds. Nothing is dropped unless a capacity is set."
        )
        yield Section("Exchange", text, draw_exchange(rows, folder / "exchange.png"))


def _dead_section(dead: list[DeadExpert], first: int, last: int) -> Section:
    if not dead:
        return Section("Dead experts", f"None: every expert got tokens in steps {first} to {last}.")
    layers = sorted({one.layer for one in dead})
    table = []
    for layer in layers:
        own = [one for one in dead if one.layer == layer]
        names = ", ".join(str(one.expert) for one in own)
        ends = [one.last_step for one in own if one.last_step is not None]
        newest = f"up to step {max(ends)}" if ends else "never"
        table.append((str(layer), str(len(own)), names, newest))
    text = f"{len(dead)} experts in {len(layers)} layers got no token in steps {first} to {last}."
    return Section("Dead experts", text, None, ("layer", "dead", "experts", "last token"), table)


def _facts(
    workdir: pathlib.Path, rows: Rows, loads: Loads | None, dead: list[DeadExpert] | None
) -> Iterator[tuple[str, str]]:
    last = rows[-1]
    run, cfg = _json(workdir / "run.json"), _json(workdir / "config.json")
    if name := cfg.get("model", {}).get("name"):
        yield "model", str(name)
    total = cfg.get("train", {}).get("num_steps")
    yield "steps", f"{last['step']:,}" + (f" of {total:,}" if isinstance(total, int) else "")
    for name, key, show in (
        ("tokens", "tokens", short_count), ("training loss", "loss", "{:.4f}".format),
        ("validation loss", "eval_loss", "{:.4f}".format),
        ("nats a byte", "eval_nats_per_byte", "{:.4f}".format),
    ):  # fmt: skip
        known = [row[key] for row in rows if isinstance(row.get(key), int | float)]
        if known:
            yield name, show(known[-1])
    speeds = [r["tokens_per_s"] for r in rows[1:] if isinstance(r.get("tokens_per_s"), int | float)]
    if speeds:
        yield "median speed", f"{short_count(float(np.median(speeds)))} tokens/s"
    if loads is not None:
        _, layers, experts = loads.counts.shape
        yield "experts", f"{layers} layers x {experts}"
        yield "balancing", str(cfg.get("model", {}).get("moe", {}).get("balance", "unknown"))
        peaks = relative(loads.counts[-1]).max(-1)
        worst = loads.layers[int(peaks.argmax())]
        yield (
            f"busiest expert, steps {loads.first[-1]}-{loads.steps[-1]}",
            f"{peaks.mean():.2f}x mean, {peaks.max():.2f}x layer {worst}",
        )
    if dead is not None:
        yield "dead experts", str(len(dead))
    dropped = sum(sum(row["moe_dropped"]) for row in rows if row.get("moe_dropped"))
    if any(row.get("moe_dropped") for row in rows):
        yield "dropped tokens", short_count(dropped)
    if devices := run.get("devices"):
        yield "devices", str(devices)
    if isinstance(run.get("mesh"), dict):
        mesh = " x ".join(f"{axis}={n}" for axis, n in run["mesh"].items() if n != 1)
        yield "mesh", mesh or "one device"


def _json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON mapping beside the metrics; empty where there is none to be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
