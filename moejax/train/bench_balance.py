"""How balancing evens a skewed start: `python -m moejax.train.bench_balance --start=runs/tiny`.

Every run starts from the weights of one run of `tiny`, with router biases of −s·log(rank) added,
the ranks in an order of each layer's own: the load then falls with the rank, as Zipf's law has it.
The runs are ordinary ones that differ in `model.moe.balance` alone. Prints and draws the busiest
expert's load over the mean of its layer, of each step's own tokens: the mean over the layers, and
the worst layer.

How even one step can be is bounded by its tokens: the bias comes from the step before, and
neighbours in a text choose alike. With the weights held still `tiny` stays 1.15 to 1.34 on its own
batches of 16 rows of 256 tokens, 1.08 to 1.15 on 64 such rows, and 1.06 to 1.11 on 512 rows of 32,
which are taken here. It is also bounded by how far the router's inputs move in a step, hence a
learning rate near Kimi K3's.
"""

from __future__ import annotations

import argparse
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from moejax.checkpoint import Checkpoints
from moejax.config import CheckpointConfig, RunConfig, as_dict
from moejax.config.load import load_config
from moejax.observability import read_loads, read_metrics
from moejax.observability.loads import Loads, relative
from moejax.observability.plots import COLORS, WIDTH, prepare, save_png, series
from moejax.partitioning import make_mesh
from moejax.train.bench_fields import parse_with_fields
from moejax.train.initial import start_from_weights
from moejax.train.run import run
from moejax.train.state import TrainState, as_tree, build_program

GOAL = 1.1
SETTINGS: dict[str, Any] = {
    "optim.lr": 3e-4, "optim.adam_lr": 3e-4, "optim.schedule": "constant",
    "optim.warmup_fraction": 0.0, "data.batch_size": 512, "data.seq_len": 32,
    "train.accumulation": 4, "eval.every": 0, "eval.batches": 1,
    "checkpoint.every": 0, "log.loads_every": 1, "log.progress": False, "log.tensorboard": False,
    "train.self_check": "off",
}  # fmt: skip


def zipf_start(state: TrainState, scale: float, seed: int = 0) -> TrainState:
    """The state with −scale·log(rank) added to its router biases, each layer in its own order."""
    rng = np.random.default_rng(seed)

    def skewed(bias: jax.Array) -> jax.Array:
        *stacked, experts = bias.shape
        order = rng.permuted(np.tile(np.arange(1, experts + 1), (*stacked, 1)), axis=-1)
        offset = -scale * np.log(order)
        offset -= offset.mean(-1, keepdims=True)
        return jax.device_put((np.asarray(bias) + offset).astype(bias.dtype), bias.sharding)

    return state._replace(balance=jax.tree.map(skewed, state.balance))


def save_start(cfg: RunConfig, folder: pathlib.Path, scale: float) -> pathlib.Path:
    """Writes the skewed start as a checkpoint, and returns it."""
    program = build_program(cfg, make_mesh(cfg.mesh))
    state = zipf_start(start_from_weights(program, print)[0], scale)
    checkpoints = Checkpoints(folder, CheckpointConfig(asynchronous=False))
    tree = as_tree(state, cfg.seed)
    checkpoints.save(0, tree, position={}, config=as_dict(cfg), metrics={})
    checkpoints.close()
    return checkpoints.path(0)


def peaks(loads: Loads) -> np.ndarray:
    """Busiest expert over the mean of its layer, [records, layers]."""
    return relative(loads.counts).max(-1)


def by_tens(loads: Loads) -> np.ndarray:
    """The same of the tokens of ten records together, which sampling moves a third as much."""
    whole = len(loads.counts) // 10 * 10
    counts = loads.counts[:whole].reshape(-1, 10, *loads.counts.shape[1:]).sum(1)
    return relative(counts).max(-1)


def zipf_exponent(loads: Loads) -> float:
    """x of load ~ rank^-x in the first record, by least squares on logarithms, mean of layers."""
    load_LE = -np.sort(-relative(loads.counts[0]), -1)
    ranks = np.log(np.arange(1, load_LE.shape[-1] + 1))
    mean = np.log(np.maximum(load_LE, 1e-3)).mean(0)
    return -float(np.polyfit(ranks, mean, 1)[0])


def draw(workdirs: Mapping[str, pathlib.Path], out_png: pathlib.Path) -> pathlib.Path:
    """Busiest expert and loss over the steps, and the load by rank at both ends."""
    figure = Figure(figsize=(13, 4.4), dpi=110, layout="constrained")
    load, loss, ranks = (figure.add_subplot(1, 3, i + 1) for i in range(3))
    prepare(load, "Busiest expert, mean of layers (dotted: worst)", "times the mean load")
    prepare(loss, "Training loss", "nats per token")
    prepare(ranks, "Load by rank, mean of layers", "times the mean load")
    for color, (name, workdir) in zip(COLORS, workdirs.items(), strict=False):
        loads = read_loads(workdir)
        peak = peaks(loads)
        label = f"{name}, last {peak[-1].mean():.3f}"
        load.plot(loads.steps, peak.mean(-1), color=color, linewidth=WIDTH, label=label)
        load.plot(loads.steps, peak.max(-1), ":", color=color, linewidth=1)
        steps, values = series(read_metrics(workdir), "loss")
        loss.plot(steps, values, color=color, linewidth=WIDTH, label=f"{name}, {values[-1]:.3f}")
        sorted_RE = -np.sort(-relative(loads.counts), -1).mean(1)
        places = np.arange(1, sorted_RE.shape[-1] + 1)
        if name == next(iter(workdirs)):
            ranks.plot(places, sorted_RE[0], "o--", color="#222222", markersize=3, linewidth=1,
                       label="all, step 1")  # fmt: skip
        ranks.plot(places, sorted_RE[-1], color=color, linewidth=WIDTH,
                   label=f"{name}, step {loads.steps[-1]}")  # fmt: skip
    load.axhline(GOAL, color="#888888", linewidth=0.8, linestyle="--")
    ranks.set_xlabel("rank of the expert in its layer", fontsize=9)
    for axes in (load, loss):
        axes.set_xlabel("step", fontsize=9)
    for axes in (load, loss, ranks):
        axes.legend(frameon=False, fontsize=8)
    return save_png(figure, out_png)


def table(workdirs: Mapping[str, pathlib.Path]) -> str:
    """Busiest expert (mean of layers / worst layer) and loss, at a few steps."""
    lines = []
    for name, workdir in workdirs.items():
        loads, losses = read_loads(workdir), series(read_metrics(workdir), "loss")[1]
        peak, steps = peaks(loads), loads.steps
        shown = sorted(
            {0, 1, 2, 4, *range(9, len(steps), 10), len(steps) - 1} & {*range(len(steps))}
        )
        lines.append(f"{name}, from a load that falls as rank^-{zipf_exponent(loads):.2f}")
        lines.append("  step   mean  worst    loss")
        lines += [
            f"{steps[i]:6d} {peak[i].mean():6.3f} {peak[i].max():6.3f} {losses[i]:7.4f}"
            for i in shown
        ]
        below = np.flatnonzero(peak.mean(-1) < GOAL)
        lines.append(
            f"  mean of layers below {GOAL} first at step {steps[below[0]]}, in {len(below)} of "
            f"{len(steps)} steps" if len(below) else f"  mean of layers never below {GOAL}"
        )  # fmt: skip
        for place, tens in enumerate(by_tens(loads)):
            ends = f"steps {10 * place + 1}-{10 * place + 10} together"
            lines.append(f"  {ends}: {tens.mean():.3f} {tens.max():.3f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.train.bench_balance",
        usage="%(prog)s [options] [--config.FIELD=VALUE ...]",
        description=textwrap.fill(
            "Trains `tiny` once for every way to balance experts, from weights whose router "
            "biases were skewed so that the load falls with the rank as Zipf's law has it. Prints "
            "the busiest expert's load over the mean of its layer and the loss, step by step, and "
            "draws both into OUT/balance.png. --config.FIELD=VALUE changes a field of all runs.",
            79,
        ),
        epilog="example, after `moejax train --config=tiny --workdir=runs/tiny`:\n"
        "  python -m moejax.train.bench_balance --steps=20 --balance quantile none",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--start", default="runs/tiny", metavar="DIR",
        help="workdir of a run of `tiny` whose weights and tokenizer are taken "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", default="runs/balance", metavar="DIR",
        help="folder for the runs and the picture (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N",
        help="training steps of each run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--scale", type=float, default=0.15, metavar="S",
        help="how skewed: biases fall by S times the logarithm of the rank, in units of the "
        "router's scores (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--balance", nargs="+", default=["quantile", "bias_step", "none"], metavar="NAME",
        help="values of model.moe.balance, a run each (default: quantile bias_step none)",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every balancing from the skewed start; prints the table and writes the picture."""
    parser = _parser()
    options, given = parse_with_fields(parser, argv)
    tokenizer = str(pathlib.Path(options.start) / "tokenizer.json")
    settings = {**SETTINGS, "train.num_steps": options.steps, "data.tokenizer": tokenizer, **given}
    if len(jax.devices()) == 1:
        settings |= {"mesh.fsdp": 1, "mesh.expert": 1}
    settings = {name: str(value) for name, value in settings.items()}
    out = pathlib.Path(options.out)
    cfg = load_config("tiny", settings | {"init_from": options.start})
    start = save_start(cfg, out / "start", options.scale)
    workdirs: dict[str, pathlib.Path] = {}
    for balance in options.balance:
        workdirs[balance] = out / balance
        own = settings | {"init_from": str(start), "model.moe.balance": balance}
        ended = run(load_config("tiny", own), workdirs[balance], name="tiny", overrides=own)
        if ended.signum is not None:
            return 128 + ended.signum
    print(table(workdirs))
    print(draw(workdirs, out / "balance.png"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
