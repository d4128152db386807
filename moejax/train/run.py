"""A run from its config to its result: the table of contents of training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax

from moejax.checkpoint import Checkpoints
from moejax.checkpoint.weights import Weights
from moejax.config import ConfigError, RunConfig, as_dict
from moejax.data import (
    Corpus,
    Tokenizer,
    get_tokenizer,
    load_corpus,
    make_eval_batches,
    make_train_iterator,
)
from moejax.observability import Progress, RunSummary, StepProfiler, open_writers, print_summary
from moejax.observability.plots import plot_run
from moejax.partitioning import make_mesh
from moejax.train.compile import enable_cache
from moejax.train.evaluate import EvalResult, Evaluator
from moejax.train.initial import keep_for_export, start_from_weights
from moejax.train.loop import Loop
from moejax.train.signals import StopRequest
from moejax.train.state import (
    Program,
    TrainState,
    abstract_tree,
    build_program,
    from_tree,
    init_state,
)
from moejax.version import __version__


class TrainResult(NamedTuple):
    """What a run ended with.

    Attributes:
      metrics: the last step's metrics, evaluation included.
      checkpoint: folder of the newest checkpoint, None if nothing was saved.
      step: steps done.
      outcome: "finished", or why it stopped.
      signum: the signal that stopped it, None without one.
    """

    metrics: dict[str, Any]
    checkpoint: pathlib.Path | None
    step: int
    outcome: str
    signum: int | None = None


def run(
    cfg: RunConfig,
    workdir: str | os.PathLike[str],
    *,
    name: str = "",
    overrides: Mapping[str, str] | None = None,
) -> TrainResult:
    """Trains, resuming whatever `workdir` holds.

    Args:
      cfg: the whole config.
      workdir: folder of checkpoints, metrics and tokenizer; made if missing.
      name, overrides: how the user called the config and what was changed on the command line,
        for the commands that the summary proposes.
    Raises:
      ConfigError: settings, data or checkpoint that cannot be used; nothing was changed.
    """
    began = time.perf_counter()
    workdir = pathlib.Path(workdir)
    cfg.check(len(jax.devices()))
    corpora = {split: load_corpus(cfg.data, split) for split in ("train", "validation")}
    check_writable(workdir)
    enable_cache(cfg.compile_cache)
    mesh = make_mesh(cfg.mesh)
    program = build_program(cfg, mesh)
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    say = _say
    latest = checkpoints.latest_step()
    if latest is not None and latest >= cfg.train.num_steps:
        return _already_finished(cfg, workdir, checkpoints, latest)
    with _leaving_nothing(workdir):
        tokenizer = get_tokenizer(cfg.data, workdir)
        check_vocabulary(cfg, tokenizer)
        shard = (jax.process_index(), jax.process_count())
        texts = corpora["train"], corpora["validation"]
        iterator = make_train_iterator(cfg.data, tokenizer, texts[0], seed=cfg.seed, shard=shard)
        eval_rows = cfg.eval.batch_size or cfg.data.batch_size
        batches = make_eval_batches(cfg.data, tokenizer, texts[1], eval_rows, shard=shard)
        state, position, weights = restore_or_init(program, checkpoints, say)
        if "data" in position:
            iterator.set_state(position["data"])
    start = int(state.step)
    last_step = iterator.last_step(start, cfg.train.num_steps)
    if last_step < cfg.train.num_steps:
        say(
            f"data.epochs={cfg.data.epochs}: the data is used up after step {last_step} of "
            f"train.num_steps={cfg.train.num_steps}; the run ends there."
        )
    if latest is not None and last_step <= start:
        iterator.close()
        return TrainResult({}, checkpoints.path(latest), latest, "data used up before")
    _write_facts(cfg, workdir, tokenizer, corpora, mesh)
    keep_for_export(weights, workdir)
    writers = open_writers(workdir, cfg.log, first_step=start + 1)
    profiler = StepProfiler(cfg.profile, workdir, say)
    try:
        with (
            Progress(last_step, first_step=start, enabled=cfg.log.progress) as progress,
            StopRequest() as stop,
        ):
            loop = Loop(
                program, state, iterator, Evaluator(program, batches), checkpoints, writers,
                progress, profiler, int(position.get("tokens", 0)),
            )  # fmt: skip
            del state  # the loop donates it
            say(f"compiling the step for {_shape_of(mesh)} ...")
            outcome = loop.run(stop)
    finally:
        profiler.close()
        iterator.close()
        writers.close()
        checkpoints.close()
    step = int(loop.state.step)
    newest = checkpoints.latest_step()
    where = checkpoints.path(newest) if newest is not None else None
    if jax.process_index() == 0:
        summary = _summary(cfg, workdir, loop, checkpoints, outcome, step)
        summary = dataclasses.replace(
            summary,
            config=name or cfg.model.name,
            overrides=overrides or {},
            picture=str(plot_run(workdir, workdir / "curves.png")),
            wall_s=time.perf_counter() - began,
        )
        print_summary(summary)
    return TrainResult(dict(loop.last), where, step, outcome, stop.signum)


def restore_or_init(
    program: Program, checkpoints: Checkpoints, say
) -> tuple[TrainState, dict[str, Any], Weights | None]:
    """The newest readable state of the run, else weights of `init_from`, else fresh ones.

    Returns:
      The state, the position in the data, and the weights started from, if any.
    """
    cfg = program.cfg
    if checkpoints.latest_step() is not None:
        restored = checkpoints.restore(None, abstract_tree(program), fallback=True)
        if restored.warning:
            say(f"warning: {restored.warning}")
        say(f"resuming from {checkpoints.path(restored.step)}")
        return from_tree(restored.state), restored.position, None
    if not cfg.init_from:
        return init_state(program, cfg.seed), {}, None
    state, weights = start_from_weights(program, say)
    return state, {}, weights


def check_writable(workdir: pathlib.Path) -> None:
    """Raises ConfigError when nothing can be written below `workdir`; changes nothing."""
    place = workdir
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ConfigError(
            f"workdir {workdir} cannot be used: {place} is not a folder. Choose another --workdir."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(
            f"workdir {workdir} is not writable: no permission in {place}. "
            "Choose another --workdir."
        )


@contextlib.contextmanager
def _leaving_nothing(workdir: pathlib.Path) -> Iterator[None]:
    """Takes back what a failed preparation wrote: the tokenizer it trained, the folder it made."""
    was_there, tokenizer = workdir.exists(), workdir / "tokenizer.json"
    had_tokenizer = tokenizer.exists()
    try:
        yield
    except ConfigError:
        if not had_tokenizer:
            tokenizer.unlink(missing_ok=True)
        if not was_there:
            with contextlib.suppress(OSError):
                workdir.rmdir()
        raise


def check_vocabulary(cfg: RunConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError when the tokenizer has ids the embedding does not hold."""
    if tokenizer.vocab_size > cfg.model.vocab_size:
        raise ConfigError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} tokens, more than "
            f"model.vocab_size={cfg.model.vocab_size}. "
            "Raise model.vocab_size, or use a smaller tokenizer."
        )


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def _shape_of(mesh) -> str:
    shape = " x ".join(f"{axis}={n}" for axis, n in mesh.shape.items() if n > 1)
    return f"{mesh.devices.size} devices ({shape})" if shape else "one device"


def _write_facts(
    cfg: RunConfig, workdir: pathlib.Path, tokenizer: Tokenizer, corpora: dict[str, Corpus], mesh
) -> None:
    """Writes config.json (as resolved) and run.json (what else decides the numbers).

    Both stand beside the checkpoints.
    """
    if jax.process_index():
        return
    workdir.mkdir(parents=True, exist_ok=True)
    facts = {
        "moejax": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}",
        "mesh": dict(mesh.shape),
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "corpus": {
            split: {"sha256": c.sha256, "documents": len(c), "bytes": c.num_bytes}
            for split, c in corpora.items()
        },
    }
    for file, content in (("config.json", as_dict(cfg)), ("run.json", facts)):
        scratch = workdir / (file + ".tmp")
        scratch.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(scratch, workdir / file)


def _already_finished(
    cfg: RunConfig, workdir, checkpoints: Checkpoints, latest: int
) -> TrainResult:
    where = checkpoints.path(latest)
    _say(
        f"{workdir} is finished: step {latest} of train.num_steps={cfg.train.num_steps}, "
        f"in {where}. "
        f"To train on: --config.train.num_steps={2 * max(latest, cfg.train.num_steps)}; "
        "to start over: another --workdir."
    )
    return TrainResult({}, where, latest, "finished before")


def _summary(
    cfg: RunConfig,
    workdir: pathlib.Path,
    loop: Loop,
    checkpoints: Checkpoints,
    outcome: str,
    step: int,
) -> RunSummary:
    newest, best = checkpoints.latest_step(), checkpoints.best_step()
    last_eval: EvalResult | None = loop.last_eval
    return RunSummary(
        workdir=str(workdir),
        config=cfg.model.name,
        outcome=outcome,
        step=step,
        num_steps=cfg.train.num_steps,
        loss=loop.last.get("loss"),
        eval_loss=last_eval.loss if last_eval else None,
        eval_nats_per_byte=last_eval.nats_per_byte if last_eval else None,
        tokens=loop.tokens,
        tokens_per_s=loop.mean_tokens_per_s(),
        first_step_s=loop.first_step_s,
        cache=loop.compiled.cache if loop.compiled else None,
        peak_memory_bytes=loop.compiled.peak_bytes if loop.compiled else None,
        checkpoint=str(checkpoints.path(newest)) if newest is not None else None,
        best_checkpoint=str(checkpoints.path(best)) if best is not None else None,
    )
