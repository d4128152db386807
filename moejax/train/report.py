"""What a run reports when it ends, and the commands it proposes."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import sys

import jax

from moejax.checkpoint import Checkpoints
from moejax.cluster.place import COORDINATOR
from moejax.config import RunConfig
from moejax.observability import RunSummary, describe_goodput
from moejax.observability.metrics import FILE, read_metrics
from moejax.train.evaluate import EvalResult
from moejax.train.loop import Loop


def summarize(
    cfg: RunConfig,
    workdir: pathlib.Path,
    loop: Loop,
    checkpoints: Checkpoints,
    outcome: str,
) -> RunSummary:
    """The report of a run, without what only its caller knows (config, picture, wall time)."""
    newest, best = checkpoints.latest_step(), checkpoints.best_step()
    last_eval: EvalResult | None = loop.last_eval
    return RunSummary(
        workdir=str(workdir),
        config=cfg.model.name,
        outcome=outcome,
        step=int(loop.state.step),
        num_steps=cfg.train.num_steps,
        loss=loop.last.get("loss"),
        eval_loss=last_eval.loss if last_eval else None,
        eval_nats_per_byte=last_eval.nats_per_byte if last_eval else None,
        eval_sets={n: (r.loss, r.nats_per_byte) for n, r in loop.last_sets.items()},
        tokens=loop.tokens,
        tokens_per_s=loop.mean_tokens_per_s(),
        first_step_s=loop.first_step_s,
        goodput=describe_goodput(loop.last.get("goodput"), loop.goodput.num_starts)
        if loop.goodput is not None
        else None,
        cache=loop.compiled.cache if loop.compiled else None,
        peak_memory_bytes=loop.compiled.peak_bytes if loop.compiled else None,
        checkpoint=str(checkpoints.path(newest)) if newest is not None else None,
        best_checkpoint=str(checkpoints.path(best)) if best is not None else None,
        program=program_name(),
        devices=device_options(),
    )


def program_name() -> str:
    """How a shell calls the command of this environment: by its name where that finds it."""
    own, found = pathlib.Path(sys.executable).parent / "moejax", shutil.which("moejax")
    if found and (not own.exists() or os.path.samefile(found, own)):
        return "moejax"
    if not own.exists():
        return f"{shlex.quote(sys.executable)} -m moejax.cli.main"
    here = pathlib.Path.cwd()
    path = os.path.join(".", own.relative_to(here)) if here in own.parents else str(own)
    return shlex.quote(path)


def device_options() -> tuple[str, ...]:
    """Options that give another process the devices of this one."""
    several = jax.process_count() > 1
    here = os.environ.get(COORDINATOR, "").startswith("127.")  # `moejax launch local`
    options = ("--multihost",) if several and not here else ()
    on_cpu = jax.devices()[0].platform == "cpu"
    if on_cpu and not options and (len(jax.devices()) > 1 or os.environ.get("JAX_PLATFORMS")):
        return (f"--devices={len(jax.devices())}",)
    return options


def last_metrics(workdir: pathlib.Path, step: int) -> dict[str, object]:
    """The metrics that a run left of this step, or of the last one written before it."""
    rows = read_metrics(workdir) if (workdir / FILE).exists() else []
    reached = [row for row in rows if row["step"] <= step]
    return {name: value for name, value in reached[-1].items() if name != "step"} if reached else {}
