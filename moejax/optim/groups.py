"""Which optimizer, learning rate and weight decay each parameter gets, and how they apply."""

from __future__ import annotations

import dataclasses
import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from moejax.config import OptimConfig
from moejax.optim.schedule import Schedule
from moejax.partitioning import ParamInfo
from moejax.typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class ParamGroup:
    """How one parameter is updated: `W <- W - lr m(step) (direction + weight_decay W)`."""

    kind: str
    lr: float
    weight_decay: float


def assign_groups(cfg: OptimConfig, infos: PyTree) -> PyTree:
    """A ParamGroup for every parameter, in the structure of `infos`.

    Muon takes what has a matrix; AdamW the rest, or everything with `cfg.name='adamw'`. Vectors and
    names that contain an entry of `cfg.no_decay` get no decay. The first entry of `cfg.groups`
    (regex, lr_scale, weight_decay) whose regex is found in the dotted name then scales the learning
    rate and, unless its weight_decay is -1, sets the decay.
    """
    overrides = [(re.compile(regex), float(lr), float(wd)) for regex, lr, wd in cfg.groups]
    names = [info.name for info in jax.tree.leaves(infos)]
    for pattern, _, _ in overrides:
        if not any(pattern.search(name) for name in names):
            warnings.warn(
                f"optim.groups: {pattern.pattern!r} matches no parameter and has no effect.",
                stacklevel=2,
            )
    return jax.tree.map(lambda info: _group(cfg, overrides, info), infos)


def _group(cfg: OptimConfig, overrides: list, info: ParamInfo) -> ParamGroup:
    kind = "muon" if cfg.name == "muon" and info.matrix is not None else "adamw"
    lr = cfg.lr if kind == "muon" else cfg.adam_lr
    exempt = info.num_dims < 2 or any(part in info.name for part in cfg.no_decay)
    decay = 0.0 if exempt else cfg.weight_decay
    for pattern, lr_scale, override in overrides:
        if pattern.search(info.name):
            return ParamGroup(kind, lr * lr_scale, decay if override == -1 else override)
    return ParamGroup(kind, lr, decay)


class StepState(NamedTuple):
    """Updates applied so far; the schedule reads it."""

    step: Array


def apply_groups(groups: PyTree, schedule: Schedule) -> optax.GradientTransformation:
    """Turns directions into updates: `-lr m(step) (direction + weight_decay W)` per parameter.

    The decay is decoupled: it never enters the moments of the direction.
    """

    def init(params: PyTree) -> StepState:
        return StepState(jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: StepState, params: PyTree) -> tuple[PyTree, StepState]:
        scale = schedule(state.step)

        def leaf(direction: Array, param: Array, group: ParamGroup) -> Array:
            if group.weight_decay:
                direction = direction + group.weight_decay * param
            return -(group.lr * scale) * direction

        updates = jax.tree.map(leaf, updates, params, groups)
        return updates, StepState(optax.safe_increment(state.step))

    return optax.GradientTransformation(init, update)
