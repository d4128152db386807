"""The update of a run whose optimizer state is in host memory, one layer after the other.

Every transformation of the chain but the clip acts on each layer's parameters alone, so the same
chain is built for one layer of each run and applied to slices of the whole state. The state's
structure, and so a checkpoint, is that of the update at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from moejax.config import OptimConfig
from moejax.memory.host_state import update_layers
from moejax.optim.build import build_optimizer
from moejax.optim.groups import assign_groups
from moejax.partitioning import ParamInfo
from moejax.typing import Array, PyTree

Path = tuple[Any, ...]
Flat = dict[Path, Any]


class Finish(NamedTuple):
    """What a layer's update still goes through.

    Attributes:
      updates: ``(infos, updates) -> updates`` before they are added; trees of one layer.
      params: ``(params, extras) -> params`` after it.
      extras: what `params` reads, leaves [*lead, ...], by the first two names of a run.
    """

    updates: Callable[[PyTree, PyTree], PyTree]
    params: Callable[[PyTree, PyTree], PyTree]
    extras: Mapping[tuple[str, str], PyTree]


def streamed_update(
    cfg: OptimConfig, num_steps: int, infos: PyTree, grads: PyTree, state: PyTree, params: PyTree,
    copies: Flat, *, norm: Array, ok: Array, finish: Finish,
) -> tuple[PyTree, PyTree, Flat]:  # fmt: skip
    """Parameters, optimizer state and copies after the update of `build_optimizer(cfg, ...)`.

    Args:
      cfg, num_steps, infos: as :func:`build_optimizer`.
      grads, params: trees of `infos`' structure; gradients of any floating dtype.
      state: of that optimizer. Leaves of it and of `params` that are in host memory stay there and
        come in layer by layer.
      copies: by path, parameters in another dtype, which follow theirs.
      norm: global norm of all gradients.
      ok: bool; where it is False parameters and state stay what they are.
      finish: what else happens to updates and parameters.
    """
    infos, groups = flat(infos), flat(assign_groups(cfg, infos))
    grads, params = flat(grads), flat(params)
    old, structure = flat(state), jax.tree.structure(state)
    new, copies = dict(old), dict(copies)
    for lead, paths in _runs(infos, params):
        run = _Run(cfg, num_steps, infos, groups, norm, lead, paths, params)
        names = tuple(key.key for key in paths[0][:2])
        copied = [path for path in paths if path in copies]
        changed = (
            [params[path] for path in paths], [old[path] for path in run.own],
            [copies[path] for path in copied],
        )  # fmt: skip
        read = [grads[path] for path in paths], finish.extras.get(names, {})
        changed, shared = update_layers(
            lambda *args, run=run, copied=copied: run.step(*args, copied, ok, finish),
            lead, changed, read, [old[path] for path in run.shared],
        )  # fmt: skip
        params |= zip(paths, changed[0], strict=True)
        new |= zip([*run.own, *run.shared], [*changed[1], *shared], strict=True)
        copies |= zip(copied, changed[2], strict=True)
    return nested(params), jax.tree.unflatten(structure, list(new.values())), copies


class _Run:
    """Parameters that are updated together, and the chain for one layer of them."""

    def __init__(self, cfg, num_steps, infos, groups, norm, lead, paths, params):
        self.paths: list[Path] = paths
        self.infos = nested({p: dataclasses.replace(infos[p], stack=0) for p in paths})
        groups = nested({path: groups[path] for path in paths})
        self.chain = build_optimizer(cfg, num_steps, self.infos, groups=groups, norm=norm)
        one = {p: jax.ShapeDtypeStruct(params[p].shape[len(lead) :], jnp.float32) for p in paths}
        state = jax.eval_shape(self.chain.init, nested(one))
        self.wanted, self.tree = list(flat(state)), jax.tree.structure(state)
        self.own = [path for path in self.wanted if tail_in(path, one)]
        self.shared = [path for path in self.wanted if not tail_in(path, one)]

    def step(self, changed, read, shared, copied: list[Path], ok: Array, finish: Finish):
        """One layer of :func:`update_layers`."""
        (params, own, copies), (grads, extras) = changed, read
        leaves = dict(zip([*self.own, *self.shared], [*own, *shared], strict=True))
        state = jax.tree.unflatten(self.tree, [leaves[path] for path in self.wanted])
        tree = nested(dict(zip(self.paths, params, strict=True)))
        grads = [g.astype(jnp.float32) for g in grads]
        grads = nested(dict(zip(self.paths, grads, strict=True)))
        updates, state = self.chain.update(grads, state, tree)
        tree = optax.apply_updates(tree, finish.updates(self.infos, updates))
        tree, state = flat(finish.params(tree, extras)), flat(state)
        casts = [tree[p].astype(old.dtype) for p, old in zip(copied, copies, strict=True)]
        new = [tree[p] for p in self.paths], [state[p] for p in self.own], casts
        keep = lambda a, b: jnp.where(ok, a, b)  # noqa: E731
        new = jax.tree.map(keep, new, changed)
        return new, [keep(state[p], old) for p, old in zip(self.shared, shared, strict=True)]


def _runs(infos: Flat, params: Flat) -> list[tuple[tuple[int, ...], list[Path]]]:
    """(stacked dims, paths) of parameters that are updated together; those of no stack alone."""
    runs: dict[tuple, list[Path]] = {}
    for path, info in infos.items():
        lead = params[path].shape[: info.stack]
        runs.setdefault((lead, path[:2] if info.stack else path), []).append(path)
    return [(lead, paths) for (lead, _), paths in runs.items()]


def tail_in(path: Path, known: Mapping[Path, Any]) -> Path:
    """The longest end of a path that is `known`, () without one."""
    return next((path[i:] for i in range(len(path)) if path[i:] in known), ())


def flat(tree: PyTree) -> Flat:
    """Leaves by path."""
    is_info = lambda node: isinstance(node, ParamInfo)  # noqa: E731
    return dict(jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_info)[0])


def nested(leaves: Flat) -> dict:
    """The nested dicts whose leaves have these paths."""
    tree: dict = {}
    for path, leaf in leaves.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key.key, {})
        node[path[-1].key] = leaf
    return tree
