"""What a new run starts from: weights of another, taken whole or in part, and said which."""

from __future__ import annotations

import fnmatch
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.weights import Weights, open_weights, total_values
from moejax.config import ConfigError, RunConfig
from moejax.models.hf_config_write import first_difference
from moejax.train.state import Program, TrainState, abstract_tree, init_state

Say = Callable[[str], Any]


def start_from_weights(program: Program, say: Say) -> tuple[TrainState, Weights]:
    """A fresh state with the weights of `init_from`.

    Leaves that it lacks (or has in another shape) start fresh, and leaves of it that the model
    lacks stay behind, where `init_allow` names them; `say` is told which.

    Raises:
      ConfigError: a leaf on either side that has no partner and is not named.
    """
    cfg = program.cfg
    weights = open_weights(cfg.init_from)
    wanted = _wanted(program)
    taken = {n: x for n, x in wanted.items() if weights.shapes.get(n) == x.shape}
    fresh = [name for name in wanted if name not in taken]
    left = [name for name in weights.shapes if name not in taken and name not in wanted]
    _check_allowed(cfg, weights, wanted, fresh, left)
    if not taken:
        raise ConfigError(f"init_from={cfg.init_from}: no parameter of this model is in it.")
    arrays = weights.read(taken)
    if fresh:
        begun = init_state(program, cfg.seed)
        own = named_leaves({"params": begun.params, "balance": begun.balance})
        arrays |= {name: own[name] for name in fresh}
    _tell(say, cfg, weights, taken, fresh, left)
    tree = {"params": program.abstract.params, "balance": program.abstract.balance}
    ordered = [arrays[name] for name in named_leaves(tree)]
    both = jax.tree.unflatten(jax.tree.structure(tree), ordered)
    return init_state(program, cfg.seed, **both), weights


def _wanted(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    tree = abstract_tree(program)
    return named_leaves({"params": tree["params"], "balance": tree["balance"]})


def shown(name: str) -> str:
    """`params/stack0/run0/attn/q` as users know it: `stack0.run0.attn.q`."""
    return name.partition("/")[2].replace("/", ".")


def _check_allowed(
    cfg: RunConfig, weights: Weights, wanted: Mapping[str, Any], fresh: list[str], left: list[str]
) -> None:
    patterns = cfg.init_allow

    def open_ones(names: list[str]) -> list[str]:
        return [n for n in names if not any(fnmatch.fnmatchcase(shown(n), p) for p in patterns)]

    for names, problem, cure in (
        (open_ones(fresh), "are not in it", "start them fresh"),
        (open_ones(left), "of it are not in this model", "leave them behind"),
    ):
        if names:
            first = shown(names[0])
            if names[0] in weights.shapes and names[0] in wanted:
                shapes = f"{weights.shapes[names[0]]} there, {wanted[names[0]].shape} here"
                problem = f"have another shape ({first}: {shapes})"
            listed = ", ".join(map(shown, names[:4])) + (", ..." if len(names) > 4 else "")
            raise ConfigError(
                f"init_from={cfg.init_from}: {len(names)} parameter{'s' * (len(names) > 1)} "
                f"{problem}: {listed}. To {cure}: --config.init_allow=\"('{first}',)\" "
                "(* stands for anything)."
            )


def _tell(
    say: Say, cfg: RunConfig, weights: Weights, taken: Mapping[str, Any], fresh: list[str],
    left: list[str],
) -> None:  # fmt: skip
    """One line a module that was taken, one a parameter that was not."""
    values = total_values({name: weights.shapes[name] for name in taken})
    say(f"starting from the weights of {cfg.init_from}: {values:,} values in {len(taken)} leaves")
    modules: dict[str, list[str]] = {}
    for name in taken:
        module, _, leaf = shown(name).rpartition(".")
        modules.setdefault(module, []).append(leaf)
    for module, leaves in modules.items():
        say(f"  taken   {module}: {' '.join(leaves)}")
    for name in fresh:
        say(f"  fresh   {shown(name)}")
    for name in left:
        say(f"  not taken   {shown(name)}")
    field = first_difference(cfg.model, weights.model)
    if field:
        say(f"  note: model.{field} differs from what the weights were made with")


def keep_for_export(weights: Weights | None, workdir: pathlib.Path) -> None:
    """What `moejax export-hf` needs to write the format that the weights came in."""
    if weights is not None and jax.process_index() == 0:
        weights.keep_for_export(workdir)
