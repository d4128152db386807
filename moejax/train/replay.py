"""A bad batch once more: what each gradient holds, at the state of the newest checkpoint before."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import Checkpoints
from moejax.config import ConfigError, RunConfig
from moejax.models.parts import flat_infos
from moejax.optim import global_norm
from moejax.partitioning import make_mesh
from moejax.partitioning.mesh import num_batch_shards
from moejax.train.bad_steps import bad_batches, read_batch
from moejax.train.diagnose import first_bad_tensor
from moejax.train.evaluate import put_batch
from moejax.train.memory_plan import keeping_nothing
from moejax.train.own_rows import own_rows
from moejax.train.run import restore_or_init
from moejax.train.state import Program, build_program
from moejax.train.step import gradients
from moejax.train.trainable import split


class Leaf(NamedTuple):
    """A gradient: how many of its numbers are NaN and infinite, and its largest finite one."""

    name: str
    nan: int
    inf: int
    largest: float


class Replayed(NamedTuple):
    """What a batch gave.

    Attributes:
      report: what the run wrote when the step was bad.
      state_step: step of the state it was replayed at.
      loss, grad_norm: now.
      leaves: one for each gradient, in the model's order.
      first_bad: the first tensor that is not finite, "" where all are.
    """

    report: dict[str, Any]
    state_step: int
    loss: float
    grad_norm: float
    leaves: list[Leaf]
    first_bad: str

    @property
    def bad(self) -> bool:
        """Whether it is bad again: not finite, or above the limit of then."""
        return bool(self.first_bad) or self.loss > float(self.report["limit"])


def choose_batch(workdir: pathlib.Path, name: str = "") -> pathlib.Path:
    """The folder of a bad batch of a run: the newest, or the one whose name begins so.

    Raises:
      ConfigError: there is none.
    """
    known = bad_batches(workdir)
    chosen = [folder for folder in known if folder.name.startswith(name)]
    if not chosen:
        listed = ", ".join(folder.name for folder in known) or "none"
        raise ConfigError(
            f"{workdir} has no bad batch{f' {name}' if name else ''}; it has {listed}. Batches are "
            "kept in WORKDIR/bad_steps when a step is bad (train.bad_step)."
        )
    return chosen[-1]


def replay(
    cfg: RunConfig, workdir: pathlib.Path, folder: pathlib.Path, say: Callable[[str], Any] = print
) -> Replayed:
    """Loss and gradients of a bad batch; nothing is written.

    Args:
      cfg: of the run; its mesh may be another.
      workdir: of the run, for its checkpoints.
      folder: of the batch.
      say: takes a line on the state that is used.
    Raises:
      ConfigError: no whole batch, or rows that do not divide over these devices.
    """
    report, rows = read_batch(folder)
    if cfg.train.remat == "auto":  # what is kept changes no number, and one step needs no plan
        cfg = keeping_nothing(cfg)
    program = build_program(cfg, make_mesh(cfg.mesh))
    checkpoints = Checkpoints(workdir, cfg.checkpoint)
    before = [step for step in checkpoints.all_steps() if step < report["step"]]
    state, _, _ = restore_or_init(program, checkpoints, say, at=before[-1] if before else 0)
    microbatches = report["microbatches"]
    batch = put_batch(program, _own_part(program, rows, microbatches), microbatches)

    def run(state, batch):
        grads, measured = gradients(program, state, batch)
        return measured["loss"], global_norm(grads), jax.tree.map(_counted, jax.tree.leaves(grads))

    with jax.set_mesh(program.mesh):
        loss, norm, counted = jax.device_get(jax.jit(run)(state, batch))
    infos = flat_infos(split(program.parts.infos, program.trains)[0])
    leaves = [
        Leaf(info.name, int(nan), int(inf), float(largest))
        for info, (nan, inf, largest) in zip(infos, counted, strict=True)
    ]
    finite = np.isfinite(loss) and np.isfinite(norm)
    first = "" if finite else first_bad_tensor(program, state, batch)
    return Replayed(report, int(state.step), float(loss), float(norm), leaves, first)


def _counted(leaf: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    finite = jnp.where(jnp.isfinite(leaf), jnp.abs(leaf), 0)
    return jnp.sum(jnp.isnan(leaf)), jnp.sum(jnp.isinf(leaf)), jnp.max(finite)


def _own_part(
    program: Program, rows: dict[str, np.ndarray], microbatches: int
) -> dict[str, np.ndarray]:
    """This process's rows of a global batch."""
    total, ways = len(next(iter(rows.values()))), num_batch_shards(dict(program.mesh.shape))
    if total % (ways * microbatches):
        raise ConfigError(
            f"the batch has {total} rows in {microbatches} microbatches, which do not divide over "
            f"{ways} batch shards. Use fewer devices."
        )
    own = list(own_rows(program, total, microbatches))
    return {name: array[own] for name, array in rows.items()}
