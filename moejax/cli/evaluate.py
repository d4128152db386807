"""`moejax eval`: the loss of a checkpoint on a split."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moejax.cli import evaluate_alone
from moejax.cli.flags import (
    Parser,
    add_config,
    add_devices,
    is_first_process,
    positive,
    start_devices,
)
from moejax.config import ConfigError, MemoryConfig, MeshConfig, RunConfig
from moejax.config.load import apply_overrides, as_run_config, load_config

if TYPE_CHECKING:
    from moejax.train.state import Program

EXAMPLES = (
    "moejax eval --workdir=runs/tiny --devices=8",
    "moejax eval --checkpoint=runs/tiny/checkpoints/200 --split=train --config.eval.batches=20",
    "moejax eval --workdir=runs/tiny --json --config.mesh.fsdp=-1 --config.mesh.expert=1",
    "moejax eval --checkpoint=Kimi-Linear --files 'docs/**/*.md' --per-document=losses.jsonl",
    "moejax eval --workdir=runs/tiny --multiple-choice=questions.jsonl",
)


def main(argv: Sequence[str]) -> int:
    """Prints the loss a token and a byte; writes nothing."""
    options, overrides = _parser().parse(argv)
    if bool(options.workdir) == bool(options.checkpoint):
        raise ConfigError("give one of --workdir=DIR and --checkpoint=PATH.")
    evaluate_alone.check(options)
    count = start_devices(options)
    if evaluate_alone.is_alone(options):
        return evaluate_alone.run(options, overrides, count)
    options.split = options.split or "validation"
    checkpoint = locate_step(options)
    asked = checkpoint_config(options, checkpoint, overrides)
    cfg, note = fit_to_devices(asked, count, overrides)
    if note and is_first_process():
        print(note, file=sys.stderr)
    # Counted in rows as configured: a mesh that rounds a batch up must not see more text.
    max_rows = asked.eval.batches * (asked.eval.batch_size or asked.data.batch_size)
    facts = evaluate(cfg, checkpoint, options.split, max_rows)
    if not is_first_process():
        return 0
    if options.json:
        print(json.dumps(facts))
    else:
        print(
            f"step {facts['step']}, {options.split} split: loss {facts['loss']:.4f} a token, "
            f"{facts['nats_per_byte']:.4f} nats a byte, over {facts['num_tokens']:,} tokens in "
            f"rows of {facts['seq_len']:,}; {left_out_words(facts)}"
            f"perplexity {facts['perplexity']:.4f}, {facts['bits_per_byte']:.4f} bits a byte "
            f"({checkpoint})"
        )
    return 0


def left_out_words(facts: Mapping[str, Any]) -> str:
    """How many documents count nothing, and why; empty where all do."""
    if not facts["left_out"]:
        return ""
    bad = f", {facts['bad_images']:,} of them for bad images" if facts["bad_images"] else ""
    return f"{facts['documents']:,} documents, {facts['left_out']:,} left out{bad}; "


def _parser() -> Parser:
    parser = Parser(
        "eval",
        what="Loss, perplexity and bits a byte of a model on text or conversations, with images or "
        "without. A split is evaluated in packed "
        "rows of data.seq_len, as during training, with the config the checkpoint was made with "
        "(or --config). "
        "--files, --alone, --per-document and model folders score every document by itself, "
        "all of it: its tokens and end of text, behind the tokenizer's begin token if there is one "
        "(else its first token has no loss and is charged the mean). Any mesh and batch size gives "
        "the same numbers.",
        examples=EXAMPLES,
    )
    parser.add_argument("--workdir", metavar="DIR", help="a run; its newest checkpoint is used")
    parser.add_argument(
        "--checkpoint", metavar="PATH",
        help="instead of --workdir: a checkpoint, an imported one, or a Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    parser.add_argument(
        "--split", choices=("validation", "train"),
        help="which part of the config's text (default: validation)",
    )  # fmt: skip
    _add_alone(parser)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    add_config(parser, "a config instead of the checkpoint's own")
    add_devices(parser)
    return parser


def _add_alone(parser: Parser) -> None:
    group = parser.add_argument_group("documents by themselves")
    group.add_argument(
        "--files",
        nargs="+",
        metavar="GLOB",
        help=".txt, .md, .py; .jsonl: a line each",
    )
    group.add_argument(
        "--text-field", default="text", metavar="NAME", help="of a .jsonl line (default: text)"
    )
    group.add_argument("--alone", action="store_true", help="score the split's documents so too")
    group.add_argument(
        "--per-document", metavar="FILE",
        help="JSON lines: name, tokens, scored, bytes, loss (nats, summed), nats_per_byte",
    )  # fmt: skip
    group.add_argument(
        "--window", type=positive, metavar="N",
        help="tokens fed at once, at most (default: data.seq_len of the run, or of the run that "
        "was merged; 2048 for published weights, which have none)",
    )  # fmt: skip
    group.add_argument(
        "--stride", type=positive, metavar="N",
        help="how far a window begins behind the one before it in a longer document; each token is "
        "scored once, nothing is carried over (default: --window, so that none is fed twice)",
    )  # fmt: skip
    group.add_argument(
        "--multiple-choice", metavar="FILE",
        help='instead, a .jsonl of {"question", "choices", "answer": number from 0}: accuracy',
    )  # fmt: skip


def locate_step(options: argparse.Namespace) -> pathlib.Path:
    """The folder of the step to evaluate."""
    from moejax.checkpoint import Checkpoints, locate

    directory, step = locate(options.workdir or options.checkpoint)
    steps = Checkpoints(directory).all_steps()
    wanted = options.step if options.step is not None else step
    if wanted is not None and wanted not in steps:
        raise ConfigError(f"no checkpoint of step {wanted} in {directory}: it has {steps}.")
    found = steps[-1] if wanted is None else wanted
    Checkpoints(directory).verify(found)
    return directory / str(found)


def checkpoint_config(
    options: argparse.Namespace, checkpoint: pathlib.Path, overrides: Mapping[str, Any]
) -> RunConfig:
    from moejax.checkpoint import read_config

    stored = as_run_config(read_config(checkpoint))
    if not options.config:
        return apply_overrides(stored, overrides)
    # The optimizer decides what a checkpoint holds, and nothing of the loss.
    return load_config(options.config, overrides).replace(optim=stored.optim)


def fit_to_devices(
    cfg: RunConfig, count: int, overrides: Mapping[str, Any]
) -> tuple[RunConfig, str]:
    """The config on `count` devices: its own mesh, or all devices along fsdp where it does not fit.

    Returns:
      The config, checked, and one line on what was changed (empty when nothing was).
    Raises:
      ConfigError: the mesh was asked for by hand and does not fit.
    """
    note = ""
    try:
        sizes = cfg.mesh.sizes(count)
    except ConfigError as error:
        if any(name.startswith("mesh.") for name in overrides):
            raise
        moe = cfg.model.moe.replace(exchange="auto", exchange_level="expert", exchange_hosts=0)
        cfg = cfg.replace(mesh=MeshConfig(), model=cfg.model.replace(moe=moe))
        sizes = cfg.mesh.sizes(count)
        note = f"note: {str(error).split('. ')[0].rstrip('.')}; evaluating on fsdp={count} instead."
    ways = sizes["data"] * sizes["fsdp"] * sizes["expert"]
    # Short batches are filled with empty rows, so any number of rows can be rounded up.
    rows = -(-(cfg.eval.batch_size or cfg.data.batch_size) // ways) * ways
    cfg = cfg.replace(
        data=cfg.data.replace(batch_size=rows),
        eval=cfg.eval.replace(batch_size=rows, batches=0),
        train=cfg.train.replace(accumulation=1),
    )
    cfg.check(count)
    return cfg, note


def evaluate(
    cfg: RunConfig, checkpoint: pathlib.Path, split: str, max_rows: int = 0
) -> dict[str, Any]:
    """Checkpoint, step, split, and what its loss is a token and a byte, ready for JSON.

    Over the first `max_rows` rows of the split, 0 = all; num_bytes and documents are the split's,
    without what is left out: too long, or `bad_images`, of which some are found only when read.
    """
    import jax

    from moejax.data import load_corpus, make_eval_batches
    from moejax.generate.documents import perplexity
    from moejax.partitioning import make_mesh
    from moejax.train.compile import enable_cache
    from moejax.train.evaluate import Evaluator
    from moejax.train.run import check_vocabulary
    from moejax.train.state import build_program

    corpus = load_corpus(cfg.data, split)  # type: ignore[arg-type]
    tokenizer = checkpoint_tokenizer(cfg, checkpoint)
    check_vocabulary(cfg, tokenizer)
    enable_cache(cfg.compile_cache)
    cfg = cfg.replace(memory=MemoryConfig())  # weights alone have room on the devices
    program = build_program(cfg, make_mesh(cfg.mesh))
    step = int(checkpoint.name)
    params, balance = model_state(program, checkpoint)
    shard = (jax.process_index(), jax.process_count())
    batches = make_eval_batches(
        cfg.data,
        tokenizer,
        corpus,
        cfg.eval.batch_size,
        shard=shard,
        max_rows=max_rows,
        vision=cfg.model.vision,
    )
    result = Evaluator(program, batches)(params, balance)
    damaged = total_over_processes(batches.num_damaged)
    left_out = batches.num_left_out + damaged
    return {
        "checkpoint": str(checkpoint),
        "step": step,
        "split": split,
        "loss": result.loss,
        "nats_per_byte": result.nats_per_byte,
        "perplexity": perplexity(result.loss),
        "bits_per_byte": result.nats_per_byte / math.log(2),
        "num_tokens": result.num_labels,
        "seq_len": cfg.data.seq_len,
        "num_bytes": batches.num_bytes,
        "documents": len(corpus) - left_out,
        "left_out": left_out,
        "bad_images": batches.num_bad_images + damaged,
    }


def total_over_processes(count: int) -> int:
    """The sum of what every process counted."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return count
    return int(multihost_utils.process_allgather(np.int32(count)).sum())


def model_state(program: Program, checkpoint: pathlib.Path) -> tuple[Any, Any]:
    """Weights (their average where the run kept one) and balancing state of a step.

    The optimizer's state is read only for the average; an imported checkpoint has none.
    """
    from moejax.checkpoint import Checkpoints, has_part
    from moejax.checkpoint.base import read_model
    from moejax.optim import ema_params
    from moejax.train.state import abstract_tree

    cfg, abstract = program.cfg, abstract_tree(program)
    if cfg.optim.ema_decay and has_part(checkpoint, "opt_state"):
        state = Checkpoints(checkpoint.parent).restore(int(checkpoint.name), abstract).state
        return ema_params(state["opt_state"]), state["balance"]
    model = read_model(cfg, checkpoint, program.parts, abstract)
    return model["params"], model["balance"]


def checkpoint_tokenizer(cfg: RunConfig, checkpoint: pathlib.Path) -> Any:
    """The run's own tokenizer; evaluation trains none."""
    from moejax.data import get_tokenizer

    data = cfg.data
    if data.tokenizer == "bpe":
        kept = checkpoint.parent.parent / "tokenizer.json"
        if not kept.exists():
            raise ConfigError(
                f"{kept} is missing: the run's tokenizer lies in its workdir. "
                "Name it with --config.data.tokenizer=FILE."
            )
        data = dataclasses.replace(data, tokenizer=str(kept))
    elif (checkpoint.parent.parent / data.tokenizer).exists():  # an import brings its own
        data = dataclasses.replace(data, tokenizer=str(checkpoint.parent.parent / data.tokenizer))
    return get_tokenizer(data, None)
