"""Pictures of a run: loss, learning rate, speed, expert load; and several runs' losses in one."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moejax.config import ConfigError
from moejax.observability.loads import layer_numbers
from moejax.observability.metrics import read_metrics, unwritable

COLORS = ("#1f5fa8", "#d1622b", "#3a8a4d", "#8455a3", "#b03a5b", "#6b6b6b")
WIDTH = 1.4
_STEEP = 8  # a load from which on linear colours would hide what is near 1
Rows = Sequence[Mapping[str, Any]]


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a scalar metric, where it was written."""
    pairs = [(r["step"], r[name]) for r in rows if isinstance(r.get(name), int | float)]
    steps, values = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(steps), np.array(values, float)


def known(values: Sequence[float | None] | None) -> list[float]:
    """What was not NaN or infinite when it was written."""
    return [x for x in values or () if x is not None]


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a window of 1/40 of the curve; narrower at the start, where the curve falls."""
    half, index = max(len(values) // 80, 1), np.arange(len(values))
    total = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(index - half, 0)
    high = np.minimum(index + np.minimum(half, index), len(values) - 1)
    return (total[high + 1] - total[low]) / (high + 1 - low)


def prepare(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    whole = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 2.5, 5, 10])
    axes.xaxis.set_major_locator(whole)


def draw_loss(axes: Axes, rows: Rows) -> None:
    prepare(axes, "Loss", "nats per token")
    steps, values = series(rows, "loss")
    if len(values):
        axes.plot(steps, values, color=COLORS[0], linewidth=0.6, alpha=0.35)
        label = f"training, last {values[-1]:.3f}"
        axes.plot(steps, smooth(values), color=COLORS[0], label=label, linewidth=WIDTH)
    steps, values = series(rows, "eval_loss")
    if len(values):
        label = f"validation, last {values[-1]:.3f}"
        _, per_byte = series(rows, "eval_nats_per_byte")
        if len(per_byte):
            label += f" ({per_byte[-1]:.3f} nats/byte)"
        axes.plot(steps, values, "o-", color=COLORS[1], markersize=4, label=label, linewidth=WIDTH)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9)


def draw_line(axes: Axes, rows: Rows, name: str, title: str, unit: str) -> None:
    prepare(axes, title, unit)
    steps, values = series(rows, name)
    axes.plot(steps, values, color=COLORS[2], linewidth=WIDTH)
    axes.set_ylim(bottom=0)


def draw_speed(axes: Axes, rows: Rows) -> None:
    """Tokens a second; the first step, which compiles, would flatten the rest."""
    draw_line(axes, rows[1:] if len(rows) > 1 else rows, "tokens_per_s", "Speed", "tokens/s")


def layer_rows(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps and [layers, columns] of a metric that is a list a step, or one number.

    Neighbouring steps are averaged to at most 120 columns: more would be finer than the picture.
    """
    found = [(r["step"], r[name]) for r in rows if r.get(name) is not None]
    if not found:
        return None
    lists = [value if isinstance(value, list) else [value] for _, value in found]
    load_XG = np.full((max(map(len, lists)), len(found)), np.nan)
    for i, values in enumerate(lists):
        load_XG[: len(values), i] = [np.nan if x is None else x for x in values]
    groups = np.array_split(load_XG, min(len(found), 120), axis=1)
    known = [np.isfinite(group).sum(axis=1) for group in groups]
    means = [
        np.nansum(group, axis=1) / np.where(count, count, np.nan)
        for group, count in zip(groups, known, strict=True)
    ]
    return np.array([step for step, _ in found]), np.stack(means, axis=1)


def layer_ticks(axes: Axes, layers: Sequence[int]) -> None:
    """At most 12 ticks for rows 0, 1, ... that bear these layers' numbers."""
    places = MaxNLocator(12, integer=True).tick_values(0, len(layers) - 1)
    shown = [int(p) for p in places if 0 <= p < len(layers) and p == int(p)]
    axes.set_yticks(shown, [str(layers[p]) for p in shown])


def draw_steps(
    figure: Figure, axes: Axes, rows: Rows, name: str, title: str,
    layers: Sequence[int] | None = None,
) -> None:  # fmt: skip
    """A metric of every layer over the steps, the first layer at the top.

    Args:
      figure, axes: to draw on.
      rows: of the metrics.
      name: the metric.
      title: over the picture.
      layers: numbers of the layers; where they are unknown those with experts are counted from 0.
    """
    found = layer_rows(rows, name)
    assert found is not None
    steps, load_XG = found
    if layers is None or len(layers) != len(load_XG):
        layers = None
    prepare(axes, title, "MoE layer" if layers is None else "layer")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    image = axes.imshow(
        load_XG,
        aspect="auto",
        norm=LogNorm() if np.nanmax(load_XG, initial=0) > _STEEP else None,
        interpolation="nearest",
        cmap="viridis",
        extent=(steps[0] - 0.5, steps[-1] + 0.5, len(load_XG) - 0.5, -0.5),
    )
    layer_ticks(axes, range(len(load_XG)) if layers is None else layers)
    axes.set_xlabel("step", fontsize=9)
    bar = figure.colorbar(image, ax=axes, pad=0.02, aspect=12)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def save_png(figure: Figure, out_png: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(out_png)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        FigureCanvasAgg(figure).print_png(str(path))
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def plot_run(workdir: str | pathlib.Path, out_png: str | pathlib.Path) -> pathlib.Path:
    """Draws a run's `metrics.jsonl`; panels whose metrics were not written are left out.

    Args:
      workdir: the run's folder, or its metrics file.
      out_png: the picture.
    Returns:
      The path written.
    Raises:
      ConfigError: no metrics there, or the picture cannot be written.
    """
    rows = read_metrics(workdir)
    if not rows:
        raise ConfigError(f"metrics of {workdir} hold no step yet: nothing to draw.")
    heats = [
        (name, title)
        for name, title in (
            ("moe_load_max", "Busiest expert, times the mean load"),
            ("moe_load_min", "Idlest expert, times the mean load"),
        )
        if layer_rows(rows, name) is not None
    ]
    folder = pathlib.Path(workdir)
    layers = layer_numbers(folder if folder.is_dir() else folder.parent)
    figure = Figure(figsize=(11, 7 if heats else 4.8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(3 if heats else 2, 4)
    draw_loss(figure.add_subplot(grid[:2, :2]), rows)
    draw_line(figure.add_subplot(grid[0, 2:]), rows, "lr", "Learning rate", "")
    draw_speed(figure.add_subplot(grid[1, 2:]), rows)
    for i, (name, title) in enumerate(heats):
        span = slice(2 * i, 2 * i + 2) if len(heats) == 2 else slice(0, 4)
        draw_steps(figure, figure.add_subplot(grid[2, span]), rows, name, title, layers)
    if not heats:
        for axes in (figure.axes[0], figure.axes[2]):
            axes.set_xlabel("step", fontsize=9)
    return save_png(figure, out_png)


def plot_curves(
    runs: Mapping[str, str | pathlib.Path], out_png: str | pathlib.Path, metric: str = "loss"
) -> pathlib.Path:
    """Draws one metric of several runs.

    Args:
      runs: label -> workdir or metrics file.
      out_png: the picture.
      metric: name of a scalar metric.
    Returns:
      The path written.
    Raises:
      ConfigError: a run has no metrics, none of this name, or the picture cannot be written.
    """
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    unit = "nats per token" if metric in ("loss", "eval_loss") else ""
    prepare(axes, metric.replace("_", " ").capitalize(), unit)
    for i, (label, path) in enumerate(runs.items()):
        steps, values = series(read_metrics(path), metric)
        if not len(values):
            raise ConfigError(f"metrics of {path} have no {metric}: nothing to draw.")
        color = COLORS[i % len(COLORS)]
        label = f"{label}, last {values[-1]:.3f}"
        if len(values) > 80:
            axes.plot(steps, values, color=color, linewidth=0.5, alpha=0.25)
            values = smooth(values)
        axes.plot(steps, values, color=color, label=label, linewidth=WIDTH)
    axes.set_xlabel("step", fontsize=9)
    axes.legend(frameon=False, fontsize=9)
    return save_png(figure, out_png)
