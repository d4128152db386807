"""What a new run starts from: weights of another, taken whole or in part, and said which."""

from __future__ import annotations

import fnmatch
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax

from moejax.checkpoint.base import base_leaves, check_base, fingerprint, shown
from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.quantised_weights import quantising
from moejax.checkpoint.weights import Weights, open_weights, total_values
from moejax.config import ConfigError, RunConfig
from moejax.layers.adapter import is_adapter
from moejax.layers.quantised import format_of, is_scale
from moejax.lora import adapter_rows
from moejax.models.hf_config_write import first_difference
from moejax.models.parts import flat_infos, num_values
from moejax.train.state import (
    Program,
    TrainState,
    abstract_tree,
    frozen_leaves,
    init_state,
)
from moejax.train.trainable import split

Say = Callable[[str], Any]


def start_from_weights(program: Program, say: Say) -> tuple[TrainState, Weights]:
    """A fresh state with the weights of `init_from`.

    Leaves that it lacks (or has in another shape) start fresh, and leaves of it that the model
    lacks stay behind, where `init_allow` names them; `say` is told which.

    Raises:
      ConfigError: a leaf on either side that has no partner and is not named.
    """
    cfg = program.cfg
    wanted = _wanted(program)
    model = cfg.model
    weights = open_weights(
        cfg.init_from,
        packed=model.moe.expert_format == "mxfp4",
        vision=model.vision.num_layers > 0,
    )
    weights = quantising(weights, wanted)
    taken = {n: x for n, x in wanted.items() if weights.shapes.get(n) == x.shape}
    fresh = [name for name in wanted if name not in taken]
    left = [name for name in weights.shapes if name not in taken and name not in wanted]
    _check_allowed(cfg, weights, wanted, fresh, left)
    lost = [name for name in fresh if not is_adapter(shown(name))]
    if cfg.lora.rank and lost:
        raise ConfigError(
            f"init_from={cfg.init_from} lacks {len(lost)} parameters of the base, {shown(lost[0])} "
            "for one: a LoRA run keeps adapters alone, so what starts fresh below them would be "
            "gone after it. Train all parameters first, or leave the model as it is there."
        )
    if not taken:
        raise ConfigError(f"init_from={cfg.init_from}: no parameter of this model is in it.")
    arrays = weights.read(taken)
    _tell(say, cfg, weights, taken, fresh, left)
    return init_state(program, cfg.seed, arrays), weights


def _wanted(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    tree = abstract_tree(program)
    return named_leaves({"params": tree["params"], "balance": tree["balance"]})


def _check_allowed(
    cfg: RunConfig, weights: Weights, wanted: Mapping[str, Any], fresh: list[str], left: list[str]
) -> None:
    patterns = cfg.init_allow

    def open_ones(names: list[str]) -> list[str]:
        names = [n for n in names if not is_adapter(shown(n))]  # they start fresh anyway
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
    maps = [name for name in taken if not is_scale(name)]
    values = total_values({name: weights.shapes[name] for name in maps})
    say(f"starting from the weights of {cfg.init_from}: {values:,} values in {len(maps)} leaves")
    modules: dict[str, list[str]] = {}
    for name in maps:
        module, _, leaf = shown(name).rpartition(".")
        modules.setdefault(module, []).append(leaf)
    for module, leaves in modules.items():
        say(f"  taken   {module}: {' '.join(leaves)}")
    for name in fresh:
        if not is_adapter(shown(name)):
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


def read_base(program: Program, step_dir: pathlib.Path, position: Mapping[str, Any]) -> dict:
    """The frozen parameters of a LoRA run that goes on, compared with those it was started with."""
    abstract = abstract_tree(program)["params"]
    arrays = base_leaves(program.cfg, program.parts, frozen_leaves(program, abstract))
    check_base(step_dir, program.cfg.init_from, position.get("base", {}), fingerprint(arrays))
    _, frozen = split(abstract, program.trains)
    return jax.tree.unflatten(jax.tree.structure(frozen), list(arrays.values()))


def tell_adapters(program: Program, say: Say) -> None:
    """One line a kind of adapted map, and how much of the model is trained."""
    assert program.selection is not None
    rows = adapter_rows(program.selection.targets, shared_a=program.cfg.lora.shared_a)
    trained, frozen = split(program.abstract.params, program.trains)
    say("adapters:")
    for row in rows:
        say(
            f"  {row.layers:>4} x {row.module} ({row.kind}): A {row.a}, B {row.b}, "
            f"{row.parameters:,} parameters"
        )
    halves = zip(split(program.parts.infos, program.trains), (trained, frozen), strict=True)
    sizes = [sum(map(num_values, flat_infos(i), jax.tree.leaves(x))) for i, x in halves]
    say(f"  {sizes[0]:,} parameters trained, {sizes[1]:,} frozen")
    coded = [x for x in jax.tree.leaves(frozen) if format_of(x.dtype)]
    if coded:
        count = sum(math.prod(x.shape) for x in coded)
        say(f"  {count:,} of these in {program.cfg.lora.base_format}, a scale for each output")
    for warning in program.selection.warnings:
        say(f"warning: {warning}")
