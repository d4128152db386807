"""The optimizer of a run, put together from its config, and where its state is stored."""

from __future__ import annotations

import jax
import optax

from moejax.config import OptimConfig
from moejax.optim.adamw import adam_direction, clip_by_global_norm
from moejax.optim.ema import parameter_ema
from moejax.optim.groups import apply_groups, assign_groups
from moejax.optim.muon import muon_direction
from moejax.optim.schedule import make_schedule
from moejax.typing import Array, PyTree

P = jax.sharding.PartitionSpec


def build_optimizer(
    cfg: OptimConfig, num_steps: int, infos: PyTree, *,
    groups: PyTree | None = None, norm: Array | None = None,
) -> optax.GradientTransformation:  # fmt: skip
    """Clip by global norm, direction by group (Muon or AdamW), decay and rate by group, average.

    Args:
      cfg: the config section.
      num_steps: length of the schedule.
      infos: a ParamInfo for every parameter, in the structure of the parameters.
      groups: their ParamGroups where they are known already.
      norm: the gradients' global norm where these are not all of them.
    Returns:
      An optax transformation whose state is a tree of arrays shaped as the parameters, and scalars.
    Raises:
      ValueError: a group override or schedule that cannot be used.
    """
    groups = assign_groups(cfg, infos) if groups is None else groups
    labels = jax.tree.map(lambda group: group.kind, groups)
    pairs = zip(jax.tree.leaves(infos), jax.tree.leaves(labels), strict=True)
    matrices = [info for info, kind in pairs if kind == "muon"]
    muon = muon_direction(matrices, cfg.muon_momentum, cfg.muon_steps, cfg.muon_per_head)
    parts = [clip_by_global_norm(cfg.clip_norm, norm)] if cfg.clip_norm else []
    parts.append(optax.partition({"muon": muon, "adamw": adam_direction(cfg)}, labels))
    parts.append(apply_groups(groups, make_schedule(cfg, num_steps)))
    if cfg.ema_decay:
        parts.append(parameter_ema(cfg.ema_decay))
    return optax.chain(*parts)


def state_shardings(opt_state: PyTree, params: PyTree, param_shardings: PyTree) -> PyTree:
    """Where each leaf of an optimizer state is stored: with its parameter; scalars everywhere.

    A leaf belongs to the parameter whose whole path ends the leaf's path, the longest if several.

    Args:
      opt_state: state or its ShapeDtypeStructs, from `optimizer.init` or `jax.eval_shape` of it.
      params: parameters or their ShapeDtypeStructs.
      param_shardings: a NamedSharding for each parameter.
    Returns:
      A NamedSharding for every leaf of `opt_state`, in its structure.
    Raises:
      ValueError: a leaf with dims that is of no parameter, or of another shape than its own.
    """
    known = {
        path: (param.shape, sharding)
        for (path, param), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(param_shardings),
            strict=True,
        )
    }
    mesh = jax.tree.leaves(param_shardings)[0].mesh
    everywhere = jax.sharding.NamedSharding(mesh, P())

    def of_leaf(path: tuple, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.sharding.NamedSharding:
        if not leaf.shape:
            return everywhere
        tails = (known[path[start:]] for start in range(len(path)) if path[start:] in known)
        shape, sharding = next(tails, (None, everywhere))
        if shape != leaf.shape:
            raise ValueError(
                f"optimizer state {jax.tree_util.keystr(path)} of shape {leaf.shape} belongs to a "
                f"parameter of shape {shape}; it must be a scalar or shaped as its parameter."
            )
        return sharding

    return jax.tree_util.tree_map_with_path(of_leaf, opt_state)
