"""A run from its config to its result: the table of contents of training."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from moejax.checkpoint import Checkpoints, LocalCheckpoints
from moejax.checkpoint.base import check_scale
from moejax.checkpoint.weights import Weights
from moejax.cluster import Watchdog, leaving_together, meet
from moejax.config import ConfigError, RunConfig
from moejax.config.load import RESOLVED_FILE
from moejax.data import (
    Corpus,
    Tokenizer,
    get_tokenizer,
    load_corpus,
    make_eval_batches,
    make_eval_sets,
    make_train_iterator,
)
from moejax.lora import write_adapters
from moejax.observability import (
    Goodput,
    LoadLog,
    Progress,
    RunSummary,
    StepProfiler,
    Writers,
    open_writers,
    print_summary,
)
from moejax.observability.plots import plot_run
from moejax.partitioning import describe_mesh, make_mesh
from moejax.train.auto_memory import tell_plan, with_chosen_memory
from moejax.train.bad_steps import BadSteps, Rewind
from moejax.train.compile import enable_cache
from moejax.train.diagnose import NonFiniteError
from moejax.train.evaluate import Evaluator
from moejax.train.initial import (
    keep_for_export,
    read_base,
    start_from_weights,
    tell_adapters,
)
from moejax.train.lock import sole_run
from moejax.train.loop import Loop
from moejax.train.notices import check_same_model, tell_lora, without_effect
from moejax.train.own_rows import own_rows
from moejax.train.placement import Placer, open_placer
from moejax.train.report import last_metrics, summarize
from moejax.train.samples import Samples
from moejax.train.self_check import self_check
from moejax.train.signals import StopRequest
from moejax.train.state import (
    Program,
    TrainState,
    abstract_tree,
    build_program,
    from_tree,
    init_state,
    saved_part,
    with_copies,
)
from moejax.train.trainable import merge
from moejax.train.workdir import (
    check_not_moved,
    check_writable,
    leaving_no_tokenizer,
    local_folder,
    write_facts,
)


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
        for the commands that the summary proposes; without a name they name the config that the
        run has written.
    Raises:
      ConfigError: settings, data or checkpoint that cannot be used, or an expert exchange that is
        wrong on these devices; nothing was changed.
    """
    with leaving_together(NonFiniteError):  # which all have at the same step
        return _run(cfg, workdir, name, overrides or {})


def _run(
    cfg: RunConfig, workdir: str | os.PathLike[str], name: str, overrides: Mapping[str, str]
) -> TrainResult:
    began = time.perf_counter()
    workdir = local_folder(workdir)
    cfg.check(len(jax.devices()), _devices_per_host())
    cfg = cfg.on(len(jax.devices()))
    if cfg.lora.rank and cfg.init_from:  # the base is read again whenever the run is, from anywhere
        cfg = cfg.replace(init_from=str(pathlib.Path(cfg.init_from).expanduser().absolute()))
    corpora = {split: load_corpus(cfg.data, split) for split in ("train", "validation")}
    check_writable(workdir)
    enable_cache(cfg.compile_cache)
    mesh = make_mesh(cfg.mesh)
    cfg, plan = with_chosen_memory(cfg, mesh)
    if plan is not None:
        tell_plan(plan)
    program = build_program(cfg, mesh)
    placer = open_placer(program)
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    latest = checkpoints.latest_step()
    check_not_moved(workdir, checkpoints)
    if latest is not None:
        check_same_model(program, checkpoints.path(latest))
        if over := _already_over(program.cfg, workdir, checkpoints, latest):
            return over
    with sole_run(workdir):
        self_check(cfg.with_hosts(), program.mesh, _say)
        if program.selection is not None:
            tell_adapters(program, _say)
            tell_lora(program, _say, fresh=latest is None)
        result, summary = _train_and_rewind(program, placer, workdir, corpora, checkpoints)
        if summary is not None:
            summary = dataclasses.replace(
                summary,
                config=name or str(workdir / RESOLVED_FILE),
                overrides=overrides,
                picture=str(plot_run(workdir, workdir / "curves.png")),
                wall_s=time.perf_counter() - began,
            )
            print_summary(summary)
    return result


def _train_and_rewind(
    program: Program, placer: Placer | None, workdir: pathlib.Path, corpora: Mapping[str, Corpus],
    checkpoints: Checkpoints,
) -> tuple[TrainResult, RunSummary | None]:  # fmt: skip
    """`_train`, from the newest checkpoint again as often as `train.bad_step` sends it back."""
    back: Rewind | None = None
    while True:
        try:
            return _train(program, placer, workdir, corpora, checkpoints, back)
        except Rewind as rewind:
            back = rewind.with_traceback(None)  # whose frames hold a state on the devices
            latest = checkpoints.latest_step()
            where = "the beginning" if latest is None else str(checkpoints.path(latest))
            _say(
                f"{back}: back to {where}, and on behind its batch ({back.count} of at most "
                f"{program.cfg.train.bad_step_limit})"
            )


def _train(
    program: Program,
    placer: Placer | None,
    workdir: pathlib.Path,
    corpora: Mapping[str, Corpus],
    checkpoints: Checkpoints,
    back: Rewind | None = None,
) -> tuple[TrainResult, RunSummary | None]:
    """Prepares and runs the loop. Returns its result, and on the first process its report.

    With `back`, state and step are those of the newest checkpoint, and the data goes on behind
    the batch that was bad.
    """
    cfg, mesh, say = program.cfg, program.mesh, _say
    latest = checkpoints.latest_step()
    saved_as, program = program, placer.program if placer else program
    with leaving_no_tokenizer(workdir):
        tokenizer = get_tokenizer(cfg.data, workdir)
        check_vocabulary(cfg, tokenizer)
        shard, texts = (jax.process_index(), jax.process_count()), corpora["train"]
        vision = cfg.model.vision
        iterator = make_train_iterator(
            cfg.data, tokenizer, texts, seed=cfg.seed, vision=vision,
            own=own_rows(program, cfg.data.batch_size, cfg.train.accumulation),
        )  # fmt: skip
        eval_rows = cfg.eval.batch_size or cfg.data.batch_size
        texts = corpora["validation"]
        batches = make_eval_batches(
            cfg.data, tokenizer, texts, eval_rows, shard=shard, vision=vision
        )
        sets = {
            name: Evaluator(program, one)
            for name, one in make_eval_sets(cfg, tokenizer, shard=shard).items()
        }
        local = None
        if cfg.checkpoint.local_every:
            local = LocalCheckpoints(cfg.checkpoint, workdir, mesh)
            if back is not None:
                local.clear()
        state, position, weights = restore_or_init(saved_as, checkpoints, say, local=local)
        if placer is not None:
            state = placer.begin(state, position.get("placement"))
        bad_steps = BadSteps(cfg.train, mesh, workdir, position.get("bad_steps"))
        if back is not None:
            position |= {"data": back.data}
            bad_steps.count = back.count
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
        found = last_metrics(workdir, latest), checkpoints.path(latest), latest
        return TrainResult(*found, "data used up before"), None
    write_facts(cfg, workdir, tokenizer, corpora, mesh)
    if program.selection is not None and not jax.process_index():
        write_adapters(workdir, program.selection.targets, shared_a=cfg.lora.shared_a)
    keep_for_export(weights, workdir)
    first = jax.process_index() == 0
    writers = open_writers(workdir, cfg.log, first_step=start + 1) if first else Writers([])
    loads = _open_loads(program, workdir, first_step=start + 1)
    goodput = Goodput.of_run(workdir, start) if first else None
    profiler = StepProfiler(cfg.profile, workdir, say)
    samples = None
    if cfg.samples.prompts:
        samples = Samples(program, tokenizer, workdir, writers, first_step=start + 1)
    try:
        with (
            Progress(
                last_step, first_step=start, enabled=cfg.log.progress, silent=not first
            ) as progress,
            StopRequest(say, several=jax.process_count() > 1) as stop,
            Watchdog(workdir, *shard, cfg.train.watchdog_s, say=_warn, meet=meet) as watchdog,
        ):
            loop = Loop(
                program, state, iterator, Evaluator(program, batches), checkpoints, writers,
                progress, profiler, int(position.get("tokens", 0)), bad_steps, watchdog,
                sets=sets, samples=samples, loads=loads, placer=placer, local=local,
                goodput=goodput,
            )  # fmt: skip
            del state  # the loop donates it
            say(f"compiling the step for {_shape_of(program)} ...")
            with leaving_together(Rewind, NonFiniteError):  # which all have at the same step
                outcome = loop.run(stop)
    finally:
        profiler.close()
        if samples is not None:
            samples.close()
        iterator.close()
        writers.close()
        if loads is not None:
            loads.close()
        if local is not None:
            local.wait()
        checkpoints.close()
    if iterator.bad_images:
        say(f"images: nothing was learned from {iterator.bad_images:,} samples with a bad one")
    newest = checkpoints.latest_step()
    where = checkpoints.path(newest) if newest is not None else None
    signum = loop.agreement.signum
    result = TrainResult(dict(loop.last), where, int(loop.state.step), outcome, signum)
    if jax.process_index():
        return result, None
    return result, summarize(cfg, workdir, loop, checkpoints, outcome)


def restore_or_init(
    program: Program,
    checkpoints: Checkpoints,
    say,
    at: int | None = None,
    local: LocalCheckpoints | None = None,
) -> tuple[TrainState, dict[str, Any], Weights | None]:
    """The newest readable state of the run, else weights of `init_from`, else fresh ones.

    Args:
      at: the checkpoint of this step instead of the newest; 0 = the state a run begins with.
      local: checkpoints of the hosts, taken where they are newer than the durable ones.
    Returns:
      The state, the position in the data, and the weights started from, if any.
    """
    cfg, durable = program.cfg, checkpoints.latest_step()
    newest = local.newest() if local is not None else None
    wanted = saved_part(program, abstract_tree(program))
    if local is not None and newest is not None and newest > (durable or 0):
        state, position, step = local.restore(newest, wanted)
        say(f"resuming from the hosts' own checkpoint of step {step}, {local.folder.parent}")
        full = _with_base(program, from_tree(state), local.folder, position)
        return with_copies(program, full), position, None
    if durable is not None and at != 0:
        restored = checkpoints.restore(at, wanted, fallback=at is None)
        if restored.warning:
            say(f"warning: {restored.warning}")
        say(f"resuming from {checkpoints.path(restored.step)}")
        where = checkpoints.path(restored.step)
        if program.has_base:
            check_scale(where, restored.config["lora"], cfg.lora)
        state = _with_base(program, from_tree(restored.state), where, restored.position)
        return with_copies(program, state), restored.position, None
    if not cfg.init_from:
        return init_state(program, cfg.seed), {}, None
    state, weights = start_from_weights(program, say)
    return state, {}, weights


def _with_base(
    program: Program, state: TrainState, where: pathlib.Path, position: Mapping[str, Any]
) -> TrainState:
    """A state with the base that a LoRA run's checkpoints leave out."""
    if not program.has_base:
        return state
    base = read_base(program, where, position)
    return state._replace(params=merge(state.params, base))


def _open_loads(program: Program, workdir: pathlib.Path, *, first_step: int) -> LoadLog | None:
    """The record of the experts' loads, where there are experts and the config wants it."""
    layers, cfg = program.parts.moe_layers(), program.cfg
    if not layers or not cfg.log.loads_every or jax.process_index():
        return None
    return LoadLog(
        workdir, layers, cfg.model.moe.num_experts,
        every=cfg.log.loads_every, first_step=first_step,
    )  # fmt: skip


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


def _devices_per_host() -> int:
    return len(jax.local_devices()) if jax.process_count() > 1 else 1


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def _shape_of(program: Program) -> str:
    shown = describe_mesh(program.mesh, program.cfg.mesh)
    devices = program.mesh.devices.size
    return f"{devices} devices ({shown})" if devices > 1 else shown


def _already_over(
    cfg: RunConfig, workdir: pathlib.Path, checkpoints: Checkpoints, latest: int
) -> TrainResult | None:
    """The result of a run that has no step left to make, said in a line or two; None for others."""
    num_steps, stop_at = cfg.train.num_steps, cfg.train.stop_at
    finished, stopped = latest >= num_steps, 0 <= stop_at <= latest
    if not (finished or stopped):
        return None
    checkpoints.verify(latest)
    where = checkpoints.path(latest)
    found = last_metrics(workdir, latest), where, latest
    if not finished:
        _say(
            f"{workdir} is at step {latest}, and train.stop_at={stop_at} is reached: nothing to "
            f"do ({where}). To train on: --config.train.stop_at=-1, or a later step."
        )
        return TrainResult(*found, "train.stop_at reached before")
    _say(
        f"{workdir} is finished: step {latest} of train.num_steps={num_steps}, in {where}. To "
        f"train on: --config.train.num_steps={2 * max(latest, num_steps)}; to start over: another "
        "--workdir."
    )
    if line := without_effect(cfg, where):
        _say(line)
    return TrainResult(*found, "finished before")
