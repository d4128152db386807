"""The adapters of a LoRA run's checkpoint, in the layout of published weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from moejax.checkpoint.hf_import import HF_FOLDER
from moejax.checkpoint.layout import CheckpointError, from_json, locate, steps_in
from moejax.checkpoint.leaf_reader import LeafReader
from moejax.checkpoint.peft_names import PeftNames
from moejax.checkpoint.peft_packing import LowRank
from moejax.config import ModelConfig, RunConfig, build_section
from moejax.layers.adapter import is_adapter
from moejax.lora import LinearMap, Target, adapted_parts
from moejax.lora.maps import TOWER
from moejax.models.hf_config import FAMILIES
from moejax.models.hf_config_write import family_name
from moejax.models.parts import model_parts


def model_type_of(workdir: pathlib.Path, cfg: ModelConfig) -> str:
    """Family of a model: of the folder that its weights came from, else the one that fits."""
    path = workdir / HF_FOLDER / "config.json"
    if path.is_file():
        found = json.loads(path.read_text(encoding="utf-8")).get("model_type")
        if found in FAMILIES:
            return str(found)
    return family_name(cfg)


def names_of(cfg: ModelConfig, model_type: str) -> PeftNames:
    """Names of a model's maps in a family's files."""
    return PeftNames(model_parts(cfg), FAMILIES[model_type].spelling, model_type)


class RunAdapters:
    """Adapters of one step of a LoRA run; read when asked for.

    Attributes:
      step_dir: the step.
      workdir: the run's folder.
      cfg: its config.
      names: maps of its model, in the spelling of the base's family.
      position: what the step says of data and base.
      others: parameters besides adapters that the run trained, and its balancing state.
    """

    def __init__(self, path: str | pathlib.Path):
        """
        Args:
          path: a workdir (its newest step), or one step.
        Raises:
          CheckpointError: no checkpoint, or one without adapters.
        """
        directory, step = locate(path)
        self.step_dir = directory / str(steps_in(directory)[-1] if step is None else step)
        self.workdir = directory.parent
        self._reader = LeafReader(self.step_dir)
        self.cfg = build_section(RunConfig, self._reader.meta["config"])
        self.position: Mapping[str, Any] = from_json(self._reader.meta["position"])
        if not self.cfg.lora.rank:
            raise CheckpointError(
                f"{self.step_dir} is of a run without adapters (lora.rank=0). Name a run that was "
                "trained with lora.rank, or a folder with an adapter in PEFT's form."
            )
        _, selection = adapted_parts(self.cfg)
        assert selection is not None
        self.names = names_of(self.cfg.model, model_type_of(self.workdir, self.cfg.model))
        self._targets = renamed(selection.targets, self.names)
        leaves = [n for n in self._reader.meta["leaves"] if n.startswith(("params/", "balance/"))]
        self.others = [name for name in leaves if not is_adapter(name.replace("/", "."))]

    def under(self, names: PeftNames) -> RunAdapters:
        """The same adapters, their maps called as in another family's files."""
        self._targets = renamed([self._targets[name] for name in self.maps()], names)
        self.names = names
        return self

    def maps(self) -> list[str]:
        """Names of the adapted maps, in the order of layers."""
        return list(self._targets)

    def read(self, name: str) -> LowRank:
        """The adapter of a map, without ranks that do nothing."""
        target, one = self._targets[name], self.names.maps[name]
        leaf = tree_path(one)
        a, b = (self._reader.read(f"params/{leaf}/{side}", one.place) for side in "ab")
        return to_published(a, b, one, target.scale).trimmed()

    def read_leaf(self, name: str, index: tuple[int | slice, ...]) -> np.ndarray:
        """Values of another leaf of the step."""
        return self._reader.read(name, index)


def renamed(targets: list[Target], names: PeftNames) -> dict[str, Target]:
    """The targets of a run under another family's names: the same maps in the same order."""
    by_place = {(m.stack, m.run, m.place, m.path): name for name, m in names.maps.items()}
    return {by_place[(t.map.stack, t.map.run, t.map.place, t.map.path)]: t for t in targets}


def tree_path(one: LinearMap) -> str:
    """Path of a map's adapter in the parameters, without `/a` and `/b`."""
    where = "vision/blocks" if one.stack == TOWER else f"stack{one.stack}/run{one.run}"
    return f"{where}/{one.path.replace('.', '/')}"


def to_published(a: np.ndarray, b: np.ndarray, one: LinearMap, scale: float) -> LowRank:
    """One layer's A [in, r] and B [r, ...] (of experts [E, ...]) turned as published weights are.

    One A for all experts is repeated, by a view.
    """
    a = np.swapaxes(np.asarray(a, np.float32), -1, -2)
    if one.num_experts and a.ndim == 2:
        a = np.broadcast_to(a, (one.num_experts, *a.shape))
    lead = (one.num_experts,) if one.num_experts else ()
    b = np.asarray(b, np.float32).reshape(*lead, a.shape[-2], one.out_size)
    return LowRank(a, np.swapaxes(b, -1, -2), scale)


def to_tree(low: LowRank, a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> tuple:
    """The inverse: A and B of one layer in the shapes that the tree has for them.

    Ranks that the tree has beyond the adapter's are 0.

    Args:
      a_shape, b_shape: of one layer, stacked dims left out.
    Raises:
      ValueError: the tree has one A for all experts, and these differ.
    """
    low = low.padded(a_shape[-1])
    a, b = np.swapaxes(low.a, -1, -2), np.swapaxes(low.b, -1, -2)
    if len(a_shape) < a.ndim:
        if not (a == a[:1]).all():
            raise ValueError("the experts' A differ")
        a = a[0]
    return np.ascontiguousarray(a), np.ascontiguousarray(b.reshape(b_shape))
