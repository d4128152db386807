"""Pictures of a report: layers x experts, balance over the steps, training, exchange."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from moejax.observability.loads import Loads, relative
from moejax.observability.plots import (
    COLORS,
    WIDTH,
    Rows,
    draw_line,
    draw_loss,
    draw_speed,
    draw_steps,
    known,
    layer_rows,
    layer_ticks,
    prepare,
    save_png,
    series,
    smooth,
)

# Half-widths of the colour scale, as factors around an even load, and what its bar names.
_SCALES = {
    1.25: (0.8, 0.9, 1, 1.1, 1.25), 1.5: (0.67, 0.8, 1, 1.25, 1.5), 2: (0.5, 0.7, 1, 1.4, 2),
    4: (0.25, 0.5, 1, 2, 4), 8: (0.125, 0.25, 0.5, 1, 2, 4, 8),
}  # fmt: skip
_DEAD = "#111111"
_MOST_NUMBERS = 24  # experts, or layers, up to which a cell has room for its number
_MOST_BORDERS = 64
_STEEP = 8  # a busiest expert from which on a linear axis would hide what is near 1


class Period(NamedTuple):
    """Steps `first` to `last`, and tokens [layers, experts] in them."""

    first: int
    last: int
    counts: np.ndarray


def draw_experts(
    periods: Sequence[Period], layers: Sequence[int], out_png: str | pathlib.Path
) -> pathlib.Path:
    """Layers x experts, coloured by load over the layer's mean on a logarithmic scale around 1.

    Beside each map stand the busiest and the idlest expert of every layer; experts without a
    token are black. All maps of one picture have one scale.
    """
    num_layers, num_experts = periods[0].counts.shape
    loads = [relative(period.counts) for period in periods]
    every = np.concatenate([load.ravel() for load in loads])
    scale, limits = _scale(every), _limits(every)
    height = float(np.clip(0.28 * num_layers, 1.8, 6.5)) + 1.1
    width = float(np.clip(6 + 0.3 * num_experts, 8, 15))
    figure = Figure(figsize=(width, height * len(periods)), dpi=110, layout="constrained")
    grid = figure.add_gridspec(len(periods), 2, width_ratios=(5 if width > 11 else 4, 1))
    for row, (period, load) in enumerate(zip(periods, loads, strict=True)):
        axes = figure.add_subplot(grid[row, 0])
        steps = f"step {period.last}"
        if period.first < period.last:
            steps = f"steps {period.first} to {period.last}"
        image = _map(axes, load, layers, scale, f"Load of every expert, {steps}")
        side = figure.add_subplot(grid[row, 1], sharey=axes)
        _extremes(side, load, limits)
        bar = figure.colorbar(image, ax=side, pad=0.04, aspect=14, fraction=0.12)
        bar.set_label("times the layer's mean", fontsize=8)
        _factors(bar.ax.yaxis, _SCALES[scale])
        bar.ax.tick_params(labelsize=8)
        bar.outline.set_visible(False)
    return save_png(figure, out_png)


def _scale(loads: np.ndarray) -> float:
    """The narrowest scale that holds all but one in a hundred of the experts that have a load."""
    alive = np.abs(np.log(loads[loads > 0]))
    widest = float(np.exp(np.quantile(alive, 0.99))) if len(alive) else 1.0
    return next((scale for scale in _SCALES if widest <= scale), max(_SCALES))


def _map(
    axes: Axes, load_LE: np.ndarray, layers: Sequence[int], scale: float, title: str
) -> AxesImage:
    prepare(axes, title, "layer")
    axes.grid(False)
    axes.spines[:].set_visible(False)
    num_layers, num_experts = load_LE.shape
    image = axes.imshow(
        np.ma.masked_equal(load_LE, 0), aspect="auto", interpolation="nearest",
        cmap="RdBu_r", norm=LogNorm(1 / scale, scale),
    )  # fmt: skip
    axes.set_facecolor(_DEAD)
    layer_ticks(axes, layers)
    axes.set_xlabel("expert", fontsize=9)
    if max(load_LE.shape) <= _MOST_BORDERS:
        axes.set_xticks(np.arange(num_experts + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(num_layers + 1) - 0.5, minor=True)
        axes.grid(True, which="minor", color="white", linewidth=1)
        axes.tick_params(which="minor", length=0)
    if max(load_LE.shape) <= _MOST_NUMBERS:
        for (layer, expert), value in np.ndenumerate(load_LE):
            strong = value == 0 or abs(np.log(value)) > 0.65 * np.log(scale)
            axes.text(
                expert, layer, f"{value:.2f}".removeprefix("0") if value else "0", fontsize=7,
                color="white" if strong else "#333333", ha="center", va="center",
            )  # fmt: skip
    if (load_LE == 0).any():
        axes.legend(
            handles=[Patch(color=_DEAD, label="no token")], loc="lower right", fontsize=8,
            bbox_to_anchor=(1, 1), frameon=False, borderaxespad=0.2,
        )  # fmt: skip
    return image


def _extremes(axes: Axes, load_LE: np.ndarray, limits: tuple[float, float]) -> None:
    """The busiest and the idlest expert of each layer, in the rows of the map beside."""
    prepare(axes, "", "")
    places = np.arange(len(load_LE))
    low, high = (np.maximum(load, limits[0]) for load in (load_LE.min(1), load_LE.max(1)))
    axes.hlines(places, low, high, color="#d8d8d8", linewidth=2, zorder=1)
    for values, color, name in ((low, "#2166ac", "idlest"), (high, "#b2182b", "busiest")):
        axes.plot(values, places, "o", color=color, markersize=3.5, label=name, zorder=2)
    axes.axvline(1, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(limits[0] / 1.1, limits[1] * 1.1)
    step = 1 + int(np.log2(limits[1] / limits[0]) // 6)  # no more ticks than have room
    _factors(axes.xaxis, [2.0**power for power in range(-12 * step, 12 * step, step)])
    axes.tick_params(which="both", labelleft=False, left=False)
    axes.set_xlabel("times the mean", fontsize=9)
    axes.legend(
        frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.1,
        ncols=2, handletextpad=0.1, columnspacing=0.8,
    )  # fmt: skip


def _limits(loads: np.ndarray) -> tuple[float, float]:
    """Lowest and highest load, at least 1/2 and 2; an idle expert stands at the lower one."""
    alive = loads[loads > 0]
    low, high = (alive.min(), alive.max()) if len(alive) else (1.0, 1.0)
    return float(np.clip(low, 1 / 32, 0.5)), max(2.0, float(high))


def _factors(axis: Axis, places: Sequence[float]) -> None:
    """Ticks of a logarithmic axis at these factors, as plain numbers."""
    axis.set_major_locator(FixedLocator(list(places)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}" if x >= 10 else f"{x:.3g}"))


def draw_balance(
    rows: Rows, loads: Loads | None, out_png: str | pathlib.Path, layers: Sequence[int] | None
) -> pathlib.Path:
    """The busiest expert of each layer (numbers `layers`), and experts without a token."""
    figure = Figure(figsize=(11, 6.4), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2)
    _busiest(figure.add_subplot(grid[0, 0]), rows, loads)
    _dead(figure.add_subplot(grid[0, 1]), rows, loads)
    whole = rows
    if loads is not None and layer_rows(rows, "moe_load_max") is None:
        peaks = relative(loads.counts).max(-1)
        whole = [
            {"step": int(s), "moe_load_max": p}
            for s, p in zip(loads.steps, peaks.tolist(), strict=True)
        ]
    title = "Busiest expert of each layer, times the mean load"
    draw_steps(figure, figure.add_subplot(grid[1, :]), whole, "moe_load_max", title, layers)
    return save_png(figure, out_png)


def _busiest(axes: Axes, rows: Rows, loads: Loads | None) -> None:
    prepare(axes, "Busiest expert", "times the mean load")
    found = [(r["step"], r["moe_load_max"]) for r in rows if r.get("moe_load_max")]
    if found:
        steps = np.array([step for step, _ in found])
        peaks = [np.array([x for x in values if x is not None] or [np.nan]) for _, values in found]
        curves = {
            "worst layer": [p.max() for p in peaks],
            "mean of layers": [p.mean() for p in peaks],
        }
        for color, (name, values) in zip((COLORS[1], COLORS[0]), curves.items(), strict=True):
            label = f"{name}, each step, last {values[-1]:.2f}"
            axes.plot(steps, values, color=color, linewidth=0.6, alpha=0.35)
            axes.plot(steps, smooth(np.array(values)), color=color, linewidth=WIDTH, label=label)
    if loads is not None:
        values = relative(loads.counts).max(-1).mean(-1)
        label = f"mean of layers, each record, last {values[-1]:.2f}"
        mark = "o" if len(values) < 60 else ""
        axes.plot(loads.steps, values, f"{mark}--", color=COLORS[2], markersize=3, linewidth=WIDTH,
                  label=label)  # fmt: skip
    axes.axhline(1, color="#888888", linewidth=0.8)
    top = axes.get_ylim()[1]
    if top > _STEEP:
        axes.set_yscale("log")
        _factors(axes.yaxis, [2.0**power for power in range(12)])
    axes.set_ylim(0.97, top)
    axes.set_xlabel("step", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _dead(axes: Axes, rows: Rows, loads: Loads | None) -> None:
    prepare(axes, "Experts without a token, all layers", "experts")
    found = [(r["step"], sum(known(r["dead_experts"]))) for r in rows if r.get("dead_experts")]
    if found:
        steps, counts = zip(*found, strict=True)
        axes.plot(steps, counts, color=COLORS[0], linewidth=WIDTH,
                  label=f"in the last 100 steps, now {counts[-1]}")  # fmt: skip
    if loads is not None:
        idle = (loads.counts == 0).sum((1, 2))
        axes.plot(loads.steps, idle, color=COLORS[1], linewidth=WIDTH, drawstyle="steps-post",
                  label=f"in a record, last {idle[-1]}")  # fmt: skip
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("step", fontsize=9)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8)


def draw_training(rows: Rows, out_png: str | pathlib.Path) -> pathlib.Path:
    """Loss, speed, learning rate, gradient norm."""
    figure = Figure(figsize=(11, 4.8), dpi=110, layout="constrained")
    grid = figure.add_gridspec(3, 4)
    draw_loss(figure.add_subplot(grid[:, :2]), rows)
    draw_speed(figure.add_subplot(grid[0, 2:]), rows)
    draw_line(figure.add_subplot(grid[1, 2:]), rows, "lr", "Learning rate", "")
    draw_line(figure.add_subplot(grid[2, 2:]), rows, "grad_norm", "Gradient norm", "")
    for axes in (figure.axes[0], figure.axes[3]):
        axes.set_xlabel("step", fontsize=9)
    return save_png(figure, out_png)


class Panel(NamedTuple):
    """Metrics of one panel: what becomes of a step's values [layers], and their unit."""

    title: str
    unit: str
    curves: Mapping[str, str]  # metric -> its label
    merge: Callable[[Sequence[float]], float]
    scale: float = 1.0


PANELS = (
    Panel("Rounds of the exchange", "worst layer", {"moe_rounds": ""}, max),
    Panel("Dropped tokens", "all layers", {"moe_dropped": ""}, sum),
    Panel(
        "Sent in the exchange", "MB a step, all layers",
        {"moe_sent_bytes": "all", "moe_sent_bytes_network": "between hosts"}, sum, 1e-6,
    ),
    Panel("Busiest device, worst layer", "times the mean", {"moe_device_load_max": ""}, max),
)  # fmt: skip


def recorded(rows: Rows) -> list[Panel]:
    """The panels that have something to show."""
    return [p for p in PANELS if any(known(r.get(name)) for r in rows for name in p.curves)]


def draw_exchange(rows: Rows, out_png: str | pathlib.Path) -> pathlib.Path:
    """Rounds, dropped tokens, bytes and device loads of the exchange, of those recorded."""
    panels = recorded(rows)
    figure = Figure(figsize=(11, 2.6 if len(panels) < 3 else 5), dpi=110, layout="constrained")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot((len(panels) + 1) // 2, min(len(panels), 2), i + 1)
        prepare(axes, panel.title, panel.unit)
        top, whole = 1.0, True
        for color, (name, label) in zip(COLORS[3:], panel.curves.items(), strict=False):
            merged = [
                {"step": r["step"], name: panel.scale * panel.merge(found)}
                for r in rows
                if (found := known(r.get(name)))
            ]
            steps, values = series(merged, name)
            if len(values):
                axes.plot(
                    steps, values, color=color, linewidth=WIDTH, drawstyle="steps-mid",
                    label=f"{label}, last {values[-1]:.3g}" if label else "",
                )  # fmt: skip
                top = max(top, 1.15 * float(values.max()))
                whole = whole and bool(np.all(values == np.round(values)))
        axes.set_ylim(0, top)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=whole, min_n_ticks=1))
        axes.set_xlabel("step", fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    return save_png(figure, out_png)
