"""What a run is told before it starts: settings without effect, and a run that is over already."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

from moejax.checkpoint.base import check_scale
from moejax.checkpoint.layout import CheckpointError, check_leaves, describe
from moejax.checkpoint.reader import DamagedError, read_meta
from moejax.config import RunConfig, build_section, flat_names
from moejax.train.state import Program, abstract_tree, saved_part

# How long and where a run goes, and what it tells: a finished one may be called with others.
_FREE = (
    "train.num_steps",
    "train.stop_at",
    "train.accumulation",
    "train.rows_per_device",
    "compile_cache",
    "kernels.",
    "mesh.",
    "log.",
    "profile.",
)
_SHAPING = (  # which leaves a checkpoint holds, and of what size
    "model.", "lora.", "optim.name", "optim.ema_decay", "train.trainable", "train.frozen_dtype",
)  # fmt: skip
_SHOWN = 6


def tell_lora(program: Program, say: Callable[[str], Any], *, fresh: bool) -> None:
    """Lines on a LoRA run: a base that knows nothing, balancing that does nothing.

    Args:
      program: of the run.
      say: is given every line.
      fresh: the run begins, so that its base can still be chosen.
    """
    cfg, balance = program.cfg, program.cfg.model.moe.balance
    if program.parts.moe_layers() and balance in ("quantile", "bias_step"):
        say(f"  router biases stay those of the base: model.moe.balance={balance} has no effect")
    if fresh and not cfg.init_from:
        say(
            f"warning: lora.rank={cfg.lora.rank} without init_from trains adapters over random "
            "weights, which stay random. Name a trained model: --config.init_from=DIR (a run, an "
            "import or a Hugging Face folder)."
        )


def check_same_model(program: Program, step_dir: pathlib.Path) -> None:
    """Raises CheckpointError where a step is of another model, and names fields that differ.

    A damaged step passes: whoever reads it tells.
    """
    with contextlib.suppress(DamagedError):
        meta = read_meta(step_dir, verify=False)
        try:
            wanted = describe(saved_part(program, abstract_tree(program)))
            check_leaves(str(step_dir), meta["leaves"], wanted)
            if program.has_base:
                check_scale(step_dir, meta["config"]["lora"], program.cfg.lora)
        except CheckpointError as error:
            fields = [f for f in differences(program.cfg, meta["config"]) if _in(f, _SHAPING)]
            if not fields:
                raise
            raise CheckpointError(f"{error} Fields that differ: {_listed(fields)}.") from error


def differences(cfg: RunConfig, saved: Any) -> list[str]:
    """Fields in which a config is not the one that a step was saved with: `optim.lr=0.1 (was 1)`.

    Args:
      cfg: the config.
      saved: nested values out of a checkpoint.
    """
    old, new = flat_names(build_section(RunConfig, saved)), flat_names(cfg)
    return [f"{name}={new[name]!r} (was {old[name]!r})" for name in new if new[name] != old[name]]


def without_effect(cfg: RunConfig, step_dir: pathlib.Path) -> str:
    """A line on fields that a finished run was not trained with; empty where there are none."""
    saved = read_meta(step_dir, verify=False)["config"]
    fields = [field for field in differences(cfg, saved) if not _in(field, _FREE)]
    return f"note: the run is over, so without effect: {_listed(fields)}" if fields else ""


def _in(field: str, beginnings: tuple[str, ...]) -> bool:
    return field.partition("=")[0].startswith(beginnings)


def _listed(fields: list[str]) -> str:
    return ", ".join(fields[:_SHOWN]) + (", ..." if len(fields) > _SHOWN else "")
