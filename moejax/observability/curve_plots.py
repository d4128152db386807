"""Three things a loss can be, apart from each other: at random weights, trained, and adapted."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moejax.config import ConfigError
from moejax.observability.metrics import read_metrics
from moejax.observability.plots import (
    COLORS,
    WIDTH,
    Rows,
    prepare,
    save_png,
    series,
    smooth,
)


def held_out(workdir: str | pathlib.Path) -> tuple[Rows, np.ndarray, np.ndarray]:
    """Metrics of a run, and the steps and values of its held-out loss in nats per byte.

    Raises:
      ConfigError: no metrics there, or none of held-out text.
    """
    rows = read_metrics(workdir)
    steps, values = series(rows, "eval_nats_per_byte")
    if not len(values):
        raise ConfigError(
            f"metrics of {workdir} have no held-out loss yet (eval_nats_per_byte): let the run "
            "reach a step of eval.every."
        )
    return rows, steps, values


def first_at_most(steps: np.ndarray, values: np.ndarray, target: float) -> int | None:
    """The first step whose value is at most the target; None where none is."""
    below = np.flatnonzero(values <= target)
    return int(steps[below[0]]) if len(below) else None


def draw_start(
    axes: Axes, points: Sequence[tuple[int, float]], vocabulary: int, std: float
) -> None:
    """Measured losses of random weights by width, on the line that arithmetic gives."""
    prepare(axes, "Random weights, step 0", "nats per token")
    flat = float(np.log(vocabulary))
    width_N = np.linspace(0, 1.08 * max(width for width, _ in points), 50)
    label = r"ln V + D s$^2$/2, " + f"V = {vocabulary:,}, s = {std:g}"
    axes.plot(width_N, flat + width_N * std**2 / 2, color=COLORS[5], linewidth=WIDTH, label=label)
    axes.axhline(flat, color=COLORS[5], linewidth=0.8, linestyle=":", label=f"ln V = {flat:.2f}")
    axes.plot(*zip(*points, strict=True), "o", color=COLORS[0], markersize=6, label="measured")
    for width, loss in points:
        axes.annotate(
            f"{loss:.2f}", (width, loss), xytext=(5, -12), textcoords="offset points", fontsize=9
        )  # fmt: skip
    axes.set_xlabel("width D", fontsize=9)
    axes.set_ylim(flat - 0.15, None)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def draw_full(axes: Axes, workdir: str | pathlib.Path, target: float) -> int | None:
    """A run's held-out loss per byte, and where it passes the target first."""
    rows, steps, values = held_out(workdir)
    prepare(axes, "All weights trained", "nats per byte")
    at, losses = series(rows, "loss")
    _, tokens = series(rows, "eval_loss")
    # Bytes of a token on held-out text; 1 with the byte tokenizer, where both units are the same.
    per_token = float(tokens[-1] / values[-1])
    losses = losses / per_token
    axes.plot(at, losses, color=COLORS[0], linewidth=0.6, alpha=0.35)
    axes.plot(at, smooth(losses), color=COLORS[0], linewidth=WIDTH, label="training")
    label = f"held-out, last {values[-1]:.2f}"
    axes.plot(steps, values, "o-", color=COLORS[1], markersize=3, linewidth=WIDTH, label=label)
    axes.axhline(target, color=COLORS[5], linewidth=0.8, linestyle=":")
    passed = first_at_most(steps, values, target)
    if passed is not None:
        loss = float(values[steps == passed][0])
        axes.plot([passed], [loss], "o", color=COLORS[4], markersize=8, fillstyle="none")
        axes.annotate(
            f"at most {target:g}\nfrom step {passed}", (passed, loss), xytext=(8, 26),
            textcoords="offset points", fontsize=9, color=COLORS[4],
        )  # fmt: skip
    axes.set_xlabel("step", fontsize=9)
    axes.legend(frameon=False, fontsize=8)
    return passed


def draw_adapted(
    token_axes: Axes, byte_axes: Axes, workdir: str | pathlib.Path,
    before: tuple[float, float] | None,
) -> None:  # fmt: skip
    """A LoRA run's losses, in nats per token and per byte: two units, two pictures.

    Adapters begin as nothing, so its base's validation loss is that of step 0.
    """
    rows, steps, per_byte = held_out(workdir)
    at, losses = series(rows, "loss")
    prepare(token_axes, "LoRA over trained weights", "nats per token")
    token_axes.plot(at, losses, color=COLORS[0], linewidth=0.6, alpha=0.35)
    token_axes.plot(at, smooth(losses), color=COLORS[0], linewidth=WIDTH, label="training")
    prepare(byte_axes, "", "nats per byte")
    byte_axes.set_xlabel("step", fontsize=9)
    steps = np.concatenate([[0] if before else [], steps])
    for i, (axes, values) in enumerate(
        ((token_axes, series(rows, "eval_loss")[1]), (byte_axes, per_byte))
    ):
        values = np.concatenate([before[i : i + 1] if before else [], values])
        label = f"validation, {values[0]:.3f} to {values[-1]:.3f}"
        axes.plot(steps, values, "o-", color=COLORS[1], markersize=4, linewidth=WIDTH, label=label)
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    byte_axes.set_xlim(token_axes.get_xlim())


def plot_losses(
    start: Sequence[tuple[int, float]], vocabulary: int, std: float, full: str | pathlib.Path,
    lora: str | pathlib.Path, out_png: str | pathlib.Path, *, target: float = 1.7,
    before: tuple[float, float] | None = None,
) -> pathlib.Path:  # fmt: skip
    """Three panels side by side.

    Args:
      start: (width, measured loss) of randomly initialised models.
      vocabulary, std: theirs.
      full: workdir of a run that trains every weight.
      lora: workdir of one that trains adapters over trained weights.
      out_png: the picture.
      target: a held-out loss per byte to mark.
      before: validation loss of the LoRA run's base, in nats per token and per byte.
    Returns:
      The path written.
    Raises:
      ConfigError: a run has no metrics of held-out text, or the picture cannot be written.
    """
    figure = Figure(figsize=(12, 4.2), dpi=100, layout="constrained")
    grid = figure.add_gridspec(2, 3)
    draw_start(figure.add_subplot(grid[:, 0]), start, vocabulary, std)
    draw_full(figure.add_subplot(grid[:, 1]), full, target)
    draw_adapted(figure.add_subplot(grid[0, 2]), figure.add_subplot(grid[1, 2]), lora, before)
    return save_png(figure, out_png)
