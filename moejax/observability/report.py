"""A run as pictures and one page: loss, speed, load of every expert, dead experts, exchange."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.observability.goodput import describe_goodput, num_starts, read_starts
from moejax.observability.loads import (
    LOADS_FILE,
    Loads,
    layer_numbers,
    read_loads,
    relative,
)
from moejax.observability.metrics import FILE
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
from moejax.observability.report_rows import Rows, read_rows

PAGE, PICTURES = "report.html", "report"


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
    """Draws a run: `report.html`, and the pictures in `report/`; they appear when all are drawn.

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
    rows = read_rows(workdir / FILE)
    loads = read_loads(workdir) if (workdir / LOADS_FILE).exists() else None
    place = pathlib.Path(out) if out is not None else workdir
    if place.exists() and not place.is_dir():
        raise ConfigError(f"--out={place} cannot be written: it is a file. Give a folder.")
    dead, seen = None, None
    if loads is not None:
        dead, seen = dead_experts(loads, window), _window(loads, window)
    facts = list(_facts(workdir, rows, loads, dead))
    layers = layer_numbers(workdir)
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".report-", dir=place) as name:
            scratch = pathlib.Path(name)
            sections = list(_sections(scratch, rows, loads, window, dead, layers))
            text = page(workdir.resolve().name, str(workdir), facts, sections)
            (scratch / PAGE).write_text(text, encoding="utf-8")
            drawn = [section.picture for section in sections if section.picture is not None]
            pictures = _put_in_place(scratch, drawn, place)
    except (OSError, ConfigError) as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        what, other = (f"--out={place}", "--out") if out is not None else (f"workdir {place}", "")
        raise ConfigError(
            f"{what} cannot be written: {reason.strerror or reason}. "
            f"{f'Choose another {other}' if other else 'Choose a folder with --out=DIR'}."
        ) from reason
    return Report(place / PAGE, pictures, facts, dead, seen)


def _put_in_place(
    scratch: pathlib.Path, drawn: list[pathlib.Path], place: pathlib.Path
) -> list[pathlib.Path]:
    """Moves the pictures to their folder, then the page; where the pictures are now."""
    folder = place / PICTURES
    folder.mkdir(exist_ok=True)
    for picture in drawn:
        os.replace(picture, folder / picture.name)
    os.replace(scratch / PAGE, place / PAGE)
    return [folder / picture.name for picture in drawn]


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
    dead: list[DeadExpert] | None, layers: tuple[int, ...] | None,
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
        picture = draw_balance(rows, loads, folder / "balance.png", layers)
        yield Section("Balance", picture=picture)
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
    if name := _at(cfg, "model", "name"):
        yield "model", str(name)
    total = _at(cfg, "train", "num_steps")
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
    if good := describe_goodput(last.get("goodput"), num_starts(read_starts(workdir))):
        yield "goodput", good
    late = [row["straggler"] for row in rows if isinstance(row.get("straggler"), int)]
    if late:
        worst = max(set(late), key=late.count)
        yield "stragglers", f"{len(late)} of {len(rows)} steps, {late.count(worst)} by {worst}"
    if loads is not None:
        _, layers, experts = loads.counts.shape
        yield "experts", f"{layers} layers x {experts}"
        yield "balancing", str(_at(cfg, "model", "moe", "balance") or "unknown")
        peaks = relative(loads.counts[-1]).max(-1)
        worst = loads.layers[int(peaks.argmax())]
        yield (
            f"busiest expert, steps {loads.first[-1]}-{loads.steps[-1]}",
            f"{peaks.mean():.2f}x mean, {peaks.max():.2f}x layer {worst}",
        )
    if dead is not None:
        yield "dead experts", str(len(dead))
    dropped = sum(sum(x or 0 for x in row["moe_dropped"]) for row in rows if row.get("moe_dropped"))
    if any(row.get("moe_dropped") for row in rows):
        yield "dropped tokens", short_count(dropped)
    if devices := run.get("devices"):
        yield "devices", str(devices)
    if isinstance(run.get("mesh"), dict):
        mesh = " x ".join(f"{axis}={n}" for axis, n in run["mesh"].items() if n != 1)
        yield "mesh", mesh or "one device"


def _at(value: Any, *names: str) -> Any:
    """A value inside nested mappings; None where there is none."""
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON mapping beside the metrics; empty where there is none to be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
