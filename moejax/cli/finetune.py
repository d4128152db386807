"""`moejax finetune`: trains a model on conversations, in a workdir of its own, or resumes there."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from moejax.cli.flags import (
    Parser,
    add_config,
    add_devices,
    exit_code,
    is_first_process,
    start_devices,
)
from moejax.config import ConfigError, RunConfig, check_asked
from moejax.config.load import RESOLVED_FILE, load_config, shipped_names

EXAMPLES = (
    "python -m moejax.data.docstrings --out=data/docstrings",
    "moejax finetune --init-from=runs/mini --workdir=runs/answers \\",
    "    --data=data/docstrings/train.jsonl --validation=data/docstrings/validation.jsonl",
    "moejax finetune --init-from=runs/mini --workdir=runs/lora --data='chats/*.jsonl' \\",
    "    --config.lora.rank=8 --config.lora.targets=\"('q_proj','k_proj')\"",
    "moejax finetune --init-from=runs/mini --data=chats.jsonl --show",
)
_FORMS = (
    'A line of the data is {"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": '
    '"...", "completion": "..."}. Only what the assistant wrote is learned (data.train_on). With '
    'data.image_patches a content may be a list with {"type": "image", "path": FILE}. '
)
# Of the rates that the base was trained with, when all parameters are.
_RATE = 0.1
_LORA_RATE = 1e-3
_EPOCHS = 3
_EVALUATIONS = 5


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when the run ended, 128 + signal when one stopped it (it has saved then)."""
    options, overrides = _parser().parse(argv)
    cfg = finetune_config(options, overrides)
    if not options.workdir and not options.show:
        raise ConfigError("--workdir is needed: the folder the fine-tuned run lives in.")
    check_asked(cfg, overrides)
    cfg.check(start_devices(options))

    from moejax.data import chat_facts, get_tokenizer, load_corpus
    from moejax.train import run
    from moejax.train.run import check_vocabulary

    tokenizer = get_tokenizer(cfg.data, options.workdir)
    check_vocabulary(cfg, tokenizer)
    facts = chat_facts(cfg.data, tokenizer, load_corpus(cfg.data, "train"), cfg.model.vision)
    cfg = with_steps(cfg, facts.rows, overrides)
    if is_first_process():
        print("\n".join([*facts.lines(), plan(cfg, facts.rows)]), flush=True)
    if options.show:
        return 0
    result = run(cfg, options.workdir)
    return exit_code(options, result.signum)


def _parser() -> Parser:
    parser = Parser(
        "finetune",
        what="Trains the weights of a run, an import or a Hugging Face folder on conversations: "
        "all parameters, or low-rank adapters with --config.lora.rank=N. " + _FORMS + "It shows "
        "how much that is and one example, then trains as `moejax train` does: called again it "
        f"resumes. Defaults that differ from the config's: {_EPOCHS} epochs, {_RATE} of its "
        f"learning rates (adapters: adamw at {_LORA_RATE}, no weight decay), "
        f"{_EVALUATIONS} evaluations; --config.FIELD=VALUE changes them.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "--init-from", metavar="DIR", help="weights to begin with: a run, a step of one, an import"
    )
    parser.add_argument(
        "--data", metavar="FILE", action="append", default=[],
        help=".jsonl file or glob of conversations, or .tar shards of images and captions; may be "
        "given more than once",
    )  # fmt: skip
    parser.add_argument(
        "--validation", metavar="FILE", action="append", default=[],
        help="held-out conversations (default: data.validation_percent of the data)",
    )  # fmt: skip
    parser.add_argument("--workdir", metavar="DIR", help="folder of the fine-tuned run")
    parser.add_argument("--show", action="store_true", help="show the data, train nothing")
    add_config(parser, "model and settings (default: those of the run in --init-from)")
    add_devices(parser)
    return parser


def finetune_config(options: argparse.Namespace, overrides: Mapping[str, str]) -> RunConfig:
    """The config named, with what fine-tuning changes, and the user's changes on top.

    Raises:
      ConfigError: no weights, no data or no config, or the tokenizer of the weights is not there.
    """
    start = options.init_from or overrides.get("init_from", "")
    if start and not pathlib.Path(start).expanduser().exists():
        raise ConfigError(f"--init-from={start} does not exist. Name a run, a step or an import.")
    named = options.config or _run_folder(start)
    if not named:
        raise ConfigError(
            f"--config is needed: one of {', '.join(shipped_names())}, or a file."
            if start
            else "--init-from is needed: the run, step or import whose weights are fine-tuned."
        )
    base = load_config(named)
    asked = load_config(named, overrides)
    start = start or base.init_from
    if not start:
        raise ConfigError("--init-from is needed: the weights that are fine-tuned.")
    changes: dict[str, Any] = {"init_from": start, **_data_changes(options, asked)}
    changes["checkpoint.dir"] = ""  # that of the run it starts from
    if asked.data.tokenizer == "bpe":
        changes["data.tokenizer"] = _tokenizer_of(start)
    changes |= _rates(base, lora=asked.lora.rank > 0)
    if "train.num_steps" not in overrides:
        changes["data.epochs"] = _EPOCHS
    return load_config(named, changes | dict(overrides))


def _data_changes(options: argparse.Namespace, asked: RunConfig) -> dict[str, Any]:
    if not options.data:
        if asked.data.source not in ("chat", "webdataset"):
            raise ConfigError("--data is needed: a .jsonl file of conversations.")
        return {}
    shards = all(path.endswith(".tar") for path in options.data)
    return {
        "data.source": "webdataset" if shards else "chat",
        "data.mixture": (),
        "data.paths": tuple(options.data),
        "data.validation_paths": tuple(options.validation),
    }


def _rates(base: RunConfig, lora: bool) -> dict[str, Any]:
    """Optimizer settings of fine-tuning."""
    common = {"optim.warmup_fraction": 0.03, "optim.decay_start": -1, "train.stop_at": -1}
    if lora:
        return common | {
            "optim.name": "adamw", "optim.lr": _LORA_RATE, "optim.adam_lr": _LORA_RATE,
            "optim.weight_decay": 0.0, "optim.ema_decay": 0.0, "optim.qk_clip": 0.0,
        }  # fmt: skip
    return common | {
        "optim.lr": _RATE * base.optim.lr, "optim.adam_lr": _RATE * base.optim.adam_lr
    }  # fmt: skip


def _near(start: str, *names: str) -> pathlib.Path | None:
    """The first of these files in a folder, or in a run's folder that `start` is a step of."""
    folder = pathlib.Path(start).expanduser()
    for place in (folder, *folder.absolute().parents[:2]):
        for name in names:
            if (place / name).is_file():
                return place / name
        if (place / RESOLVED_FILE).is_file():
            return None
    return None


def _run_folder(start: str) -> str:
    """The run or import that the weights belong to; empty for a Hugging Face folder."""
    found = _near(start, RESOLVED_FILE) if start else None
    is_ours = found is not None and (found.parent / "checkpoints").is_dir()
    return str(found.parent) if found is not None and is_ours else ""


def _tokenizer_of(start: str) -> str:
    found = _near(
        start, "tokenizer.json", "tiktoken.model", "hf/tokenizer.json", "hf/tiktoken.model"
    )
    if found is None:
        raise ConfigError(
            f"{start} has no tokenizer beside its weights. Name the one that they were trained "
            "with: --config.data.tokenizer=FILE, or byte."
        )
    return str(found.absolute())


def with_steps(cfg: RunConfig, rows: int, overrides: Mapping[str, str]) -> RunConfig:
    """The config with the steps that its epochs take, and evaluations spread over them.

    Args:
      cfg: `data.epochs` (0: the steps stay as they are) and `data.batch_size` are read.
      rows: of an epoch.
      overrides: fields that the user set, which stay as they are.
    """
    if cfg.data.epochs and "train.num_steps" not in overrides:
        steps = -(-rows * cfg.data.epochs // cfg.data.batch_size)
        cfg = cfg.replace(train=cfg.train.replace(num_steps=steps))
    every = -(-cfg.train.num_steps // _EVALUATIONS)
    if "eval.every" not in overrides:
        cfg = cfg.replace(eval=cfg.eval.replace(every=every))
    if "checkpoint.every" not in overrides:
        cfg = cfg.replace(checkpoint=cfg.checkpoint.replace(every=every))
    return cfg


def plan(cfg: RunConfig, rows: int) -> str:
    """One line: what is trained, for how long, and how often that passes over the data.

    Args:
      cfg: of the run.
      rows: of an epoch.
    """
    rank, steps, batch = cfg.lora.rank, cfg.train.num_steps, cfg.data.batch_size
    what = f"adapters of rank {rank}" if rank else "all parameters"
    if cfg.train.trainable:
        what = f"what train.trainable names ({', '.join(cfg.train.trainable)})"
    return (
        f"training {what} of {cfg.init_from}: {steps} steps of {batch} rows of {cfg.data.seq_len} "
        f"tokens, {passes(steps * batch, rows, cfg.data.epochs)}, {cfg.optim.name} at "
        f"{cfg.optim.lr:g}"
    )


def passes(seen: int, rows: int, epochs: int) -> str:
    """`480 of 533 rows once` in words: how much of the data a run reads, and how often.

    Args:
      seen: rows of all its steps.
      rows: of an epoch.
      epochs: after which the data is used up; 0: never.
    """
    seen = min(seen, rows * epochs) if epochs else seen
    if seen < rows:
        return f"{seen:,} of the {rows:,} rows, once ({seen / rows:.0%} of an epoch)"
    count = seen / rows
    shown = f"{count:.0f}" if seen % rows == 0 else f"{count:.1f}"
    return f"{shown} epoch{'s' * (shown != '1')} of {rows:,} rows"
