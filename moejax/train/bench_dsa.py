"""DSA learnt on real text: `python -m moejax.train.bench_dsa --out=runs/dsa`.

Four ordinary runs on Python's standard library, each from the weights of one before:

    base     dense attention (as many keys as a row has), from fresh weights
    warmup   stage 1, from `base`: the indexer alone learns, from the dense attention
    sparse   stage 2, from `warmup`: an eighth of the keys, everything learns
    dense    from `warmup` too: dense attention on the same batches as `sparse`

The model is a sibling of `tiny` with two layers, one KDA and one DSA, and rows of 256 tokens.

Recall is the attention mass of the chosen keys over that of as many best ones, on held-out text,
of queries that see more keys than they may choose; random picks are beside it. What is done is not
done again: a command that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from moejax.checkpoint import Checkpoints
from moejax.config import ConfigError, RunConfig
from moejax.config.load import load_config
from moejax.data import get_tokenizer, load_corpus, make_eval_batches
from moejax.layers.dsa import Dsa
from moejax.models.decoder import by_layer
from moejax.observability import read_metrics
from moejax.observability.plots import COLORS, WIDTH, prepare, save_png, series
from moejax.partitioning import make_mesh
from moejax.train.bench_fields import parse_with_fields
from moejax.train.evaluate import Evaluator, put_batch
from moejax.train.initial import start_from_weights
from moejax.train.run import run
from moejax.train.state import build_program

PHASES = ("base", "warmup", "sparse", "dense")
STEPS = (240, 80, 60)
RECALL_GOAL, LOSS_GOAL = 0.9, 1.02
SETTINGS: dict[str, Any] = {
    "model.num_layers": 2, "model.attention": "kda,dsa", "model.attn_res_block": 2,
    "model.ffn.num_dense_layers": 0,
    "data.seq_len": 256, "data.batch_size": 8, "eval.batches": 4, "eval.batch_size": 16,
    "checkpoint.keep": 100, "checkpoint.keep_best": False, "log.every": 1,
    "log.progress": False, "log.tensorboard": False, "train.self_check": "off",
}  # fmt: skip
# A run that goes on from trained weights: a quarter of the rates, on batches of another order.
_ONWARD = {"optim.lr": 5e-3, "optim.adam_lr": 1e-3, "data.shuffle_seed": 1}


def settings_of(
    out: pathlib.Path, steps: Sequence[int], given: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The settings of every phase.

    Args:
      out: folder of the runs.
      steps: of base, of warmup, of sparse and dense each.
      given: fields that all have.
    """
    base, warmup, onward = steps
    common: dict[str, Any] = dict(SETTINGS)
    if len(jax.devices()) == 1:
        common |= {"mesh.fsdp": 1, "mesh.expert": 1}
    common.update(given)
    length = load_config("tiny", _as_text(common)).data.seq_len
    few = {"model.dsa.top_k": max(length // 8, 1)}
    dense = {"model.dsa.top_k": length, "model.dsa.stage": "frozen"}
    later = {"data.tokenizer": str(out / "base" / "tokenizer.json")}
    from_base, from_warmup = ({**later, "init_from": str(out / name)} for name in PHASES[:2])

    def steps_of(number: int, parts: int) -> dict[str, int]:
        every = max(number // parts, 1)
        return {"train.num_steps": number, "checkpoint.every": every, "eval.every": every}

    changes: dict[str, dict[str, Any]] = {
        "base": {**dense, **steps_of(base, 2)},
        "warmup": {**few, **from_base, **steps_of(warmup, 4), "eval.every": 0,
                   "model.dsa.stage": "warmup", "data.shuffle_seed": 1},
        "sparse": {**few, **from_warmup, **_ONWARD, **steps_of(onward, 2),
                   "model.dsa.stage": "sparse"},
        "dense": {**dense, **from_warmup, **_ONWARD, **steps_of(onward, 2)},
    }  # fmt: skip
    return {name: _as_text({**common, **changes[name], **given}) for name in PHASES}


def _as_text(settings: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in settings.items()}


class Probe:
    """Measures held-out loss and recall of weights under one config."""

    def __init__(self, cfg: RunConfig, workdir: pathlib.Path):
        """
        Args:
          cfg: what the weights run under.
          workdir: where its tokenizer may be kept.
        """
        self._cfg, self._mesh = cfg, make_mesh(cfg.mesh)
        tokenizer = get_tokenizer(cfg.data, workdir)
        rows = cfg.eval.batch_size or cfg.data.batch_size
        corpus = load_corpus(cfg.data, "validation")
        self._batches = make_eval_batches(cfg.data, tokenizer, corpus, rows)
        self._program = build_program(cfg, self._mesh)
        self._evaluate = Evaluator(self._program, self._batches)
        self._masses = jax.jit(self._masses_of)

    def _weights(self, folder: pathlib.Path) -> tuple[dict, dict]:
        program = self._program._replace(cfg=self._cfg.replace(init_from=str(folder)))
        state = start_from_weights(program, lambda line: None)[0]
        return state.params, state.balance

    def loss(self, folder: pathlib.Path) -> float:
        """Held-out loss of the weights in `folder`."""
        return self._evaluate(*self._weights(folder)).loss

    def recall(self, folder: pathlib.Path) -> tuple[list[float], list[float]]:
        """Recall of every DSA layer's choice, and of random picks."""
        params, balance = self._weights(folder)
        total = np.zeros(())
        for number, host in enumerate(self._batches):
            if number >= (self._cfg.eval.batches or len(self._batches)):
                break
            batch = put_batch(self._program, host, 1)
            with jax.set_mesh(self._mesh):
                masses_L3 = self._masses(params, balance, batch)
            total = total + np.asarray(jax.device_get(masses_L3), np.float64)
        chosen, random, best = np.moveaxis(total, -1, 0)
        return (chosen / best).tolist(), (random / best).tolist()

    def _masses_of(self, params: dict, balance: dict, batch: dict) -> jax.Array:
        parts = self._program.parts
        model = parts.bind(params, balance)
        for _, module in nnx.iter_modules(model):
            if isinstance(module, Dsa):
                module.track_recall = True
        _, aux = model(batch["tokens"][0], batch["segment_ids"][0])
        masses_L3 = by_layer(aux, parts.segments, "recall")
        assert masses_L3 is not None
        return masses_L3


def measure(out: pathlib.Path, settings: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Everything the runs show, as plain numbers."""
    # sparse attention, and nothing of the indexer's loss is computed
    chosen = {**settings["warmup"], "model.dsa.stage": "frozen"}
    probe = Probe(load_config("tiny", chosen), out / "warmup")
    steps = Checkpoints(out / "warmup").all_steps()
    folders = [out / "base", *(Checkpoints(out / "warmup").path(step) for step in steps)]
    layers, random = zip(*map(probe.recall, folders), strict=True)
    kl_steps, kl = _kl(out / "warmup")
    losses = {name: _losses(out / name) for name in ("base", "sparse", "dense")}
    # the same weights at the start of both; masked by what the fresh and the learnt indexer choose
    start = {"dense": losses["base"][1][-1], "fresh indexer": probe.loss(out / "base")}
    start["indexer after warm-up"] = probe.loss(out / "warmup")
    cfg = load_config("tiny", settings["sparse"])
    sparse, dense = (losses[name][1][-1] for name in ("sparse", "dense"))
    return {
        "seq_len": cfg.data.seq_len, "top_k": cfg.model.dsa.top_k,
        "recall": {"steps": [0, *steps], "layers": layers, "random": random[0],
                   "after_sparse": probe.recall(out / "sparse")[0]},
        "warmup_kl": {"steps": kl_steps, "mean_of_layers": kl},
        "loss_before": start, "loss": losses,
        "sparse_over_dense": sparse / dense,
    }  # fmt: skip


def _losses(workdir: pathlib.Path) -> tuple[list[int], list[float]]:
    steps, values = series(read_metrics(workdir), "eval_loss")
    return steps.tolist(), values.tolist()


def _kl(workdir: pathlib.Path) -> tuple[list[int], list[float]]:
    rows = [row for row in read_metrics(workdir) if row.get("indexer_kl")]
    return [row["step"] for row in rows], [float(np.mean(row["indexer_kl"])) for row in rows]


def table(found: Mapping[str, Any]) -> str:
    """Recall by step of the warm-up, and both losses, against what is asked for."""
    recall = found["recall"]
    lines = [
        f"rows of {found['seq_len']} tokens, {found['top_k']} keys a query",
        f"recall of random picks: {_shown(recall['random'])}",
        *(f"recall at warm-up step {step}: {_shown(layers)}"
          for step, layers in zip(recall["steps"], recall["layers"], strict=True)),
        f"recall after sparse training: {_shown(recall['after_sparse'])}",
        f"goal after warm-up: {RECALL_GOAL}",
    ]  # fmt: skip
    before = ", ".join(f"{name} {loss:.4f}" for name, loss in found["loss_before"].items())
    lines.append(f"held-out loss before: {before}")
    for name in ("dense", "sparse"):
        steps, values = found["loss"][name]
        shown = ", ".join(f"{v:.4f} at {s}" for s, v in zip(steps, values, strict=True))
        lines.append(f"held-out loss, {name}: {shown}")
    lines.append(f"sparse / dense: {found['sparse_over_dense']:.4f}, goal at most {LOSS_GOAL}")
    return "\n".join(lines)


def _shown(layers: Sequence[float]) -> str:
    return f"{np.mean(layers):.3f} (layers {' '.join(f'{x:.3f}' for x in layers)})"


def draw(found: Mapping[str, Any], out_png: pathlib.Path) -> pathlib.Path:
    """Recall and loss of the indexer in its warm-up, and held-out losses of what follows."""
    figure = Figure(figsize=(13, 4.2), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, 3, i + 1) for i in range(3)]
    recall, kl = found["recall"], found["warmup_kl"]
    prepare(axes[0], "Recall on held-out text", "attention mass over the best keys'")
    layers_SL = np.asarray(recall["layers"])
    for layer, values in enumerate(layers_SL.T):
        label = f"DSA layer {layer + 1}, last {values[-1]:.3f}"
        axes[0].plot(recall["steps"], values, "o-", color=COLORS[layer % len(COLORS)],
                     markersize=3, linewidth=WIDTH, label=label)  # fmt: skip
    mean = float(np.mean(recall["random"]))
    axes[0].axhline(mean, color="#6b6b6b", linestyle=":", label=f"random picks, {mean:.3f}")
    axes[0].axhline(RECALL_GOAL, color="#888888", linewidth=0.8, linestyle="--", label="goal")
    axes[0].set_ylim(0, 1.02)
    prepare(axes[1], "Indexer's loss in warm-up, mean of layers", "KL, nats per query")
    axes[1].plot(kl["steps"], kl["mean_of_layers"], color=COLORS[0], linewidth=WIDTH)
    prepare(axes[2], "Held-out loss", "nats per token")
    base_steps, base = found["loss"]["base"]
    axes[2].plot(base_steps, base, "o-", color="#6b6b6b", markersize=3, label="base, dense")
    for color, name in zip(COLORS[1:], ("dense", "sparse"), strict=False):
        steps, values = found["loss"][name]
        kind = f"J = {found['top_k']}" if name == "sparse" else "goes on"
        # both begin with the base's attention, which the warm-up leaves as it is
        places = [base_steps[-1] + step for step in (0, *steps)]
        axes[2].plot(places, [base[-1], *values], "o-", color=color, markersize=3,
                     label=f"{name}, {kind}, last {values[-1]:.4f}")  # fmt: skip
    for one, unit in zip(axes, ("warm-up step", "warm-up step", "step"), strict=True):
        one.set_xlabel(unit, fontsize=9)
    for one in (axes[0], axes[2]):
        one.legend(frameon=False, fontsize=8)
    return save_png(figure, out_png)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.train.bench_dsa",
        usage="%(prog)s [options] [--config.FIELD=VALUE ...]",
        description=textwrap.fill(
            "Trains a small sibling of `tiny` densely, then its indexer alone, then with an eighth "
            "of the keys beside dense attention on the same batches. Prints the indexer's recall "
            "and both held-out losses, and writes OUT/dsa.json and OUT/dsa.png. "
            "--config.FIELD=VALUE changes a field of all runs.", 79,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--out", default="runs/dsa", metavar="DIR",
        help="folder for the runs and the picture (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, nargs=3, default=STEPS, metavar=("BASE", "WARMUP", "ON"),
        help=f"steps of base, of warmup, of sparse and dense each (default: {STEPS})",
    )  # fmt: skip
    parser.add_argument(
        "--until", choices=PHASES, default="",
        help="end after this run; the same command without it goes on (default: measure)",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None, say: Callable[[str], Any] = print) -> int:
    """Does the runs that are not done, then measures, prints and draws."""
    parser = _parser()
    options, given = parse_with_fields(parser, argv)
    out = pathlib.Path(options.out).absolute()
    try:
        settings = settings_of(out, options.steps, given)
        for name in PHASES:
            ended = run(load_config("tiny", settings[name]), out / name, name="tiny",
                        overrides=settings[name])  # fmt: skip
            if ended.signum is not None:
                return 128 + ended.signum
            if name == options.until:
                return 0
        found = measure(out, settings)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    (out / "dsa.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    say(table(found))
    say(str(draw(found, out / "dsa.png")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
