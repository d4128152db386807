"""Weights to start from: a checkpoint or a Hugging Face folder, leaf by leaf."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np

from moejax.checkpoint import layout, reader
from moejax.checkpoint.hf_import import CARRIED, HF_FOLDER, carry_to, write_side_files
from moejax.checkpoint.hf_source import HfSource
from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.streamed import carried_file
from moejax.config import ModelConfig, RunConfig, build_section

Leaves = Mapping[str, jax.ShapeDtypeStruct]  # `params/...` and `balance/...` by path


class Weights(Protocol):
    """Leaves by name, wherever they come from."""

    shapes: dict[str, tuple[int, ...]]
    model: ModelConfig

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """These leaves in the types and shardings asked for."""
        ...

    def keep_for_export(self, workdir: pathlib.Path) -> None:
        """Puts what an export needs beside the weights into a workdir."""
        ...


def open_weights(path: str | pathlib.Path, *, packed: bool = False, vision: bool = True) -> Weights:
    """A workdir, a step, an import, or a Hugging Face folder.

    Args:
      vision: take the vision tower of a Hugging Face folder that has one; else it is carried.
      packed: routed experts of a Hugging Face folder stay in MXFP4; a checkpoint has to hold them
        so already.
    Raises:
      CheckpointError: nothing there that can be read, or plain experts where packed ones are asked.
    """
    path = pathlib.Path(path).expanduser()
    if is_hf_folder(path):
        return HfWeights(path, packed=packed, vision=vision)
    weights = CheckpointWeights(path)
    if packed and not any(name.endswith("/experts/gate_up_scales") for name in weights.shapes):
        raise CheckpointError(
            f"{path} has no experts in MXFP4, which model.moe.expert_format=mxfp4 keeps as they "
            "were released. Import the published folder with --experts=packed, or leave "
            "expert_format plain."
        )
    return weights


def check_base_is_there(init_from: str) -> None:
    """Raises CheckpointError where the base of a LoRA run lies no more; names what says where."""
    if not pathlib.Path(init_from).expanduser().exists():
        raise CheckpointError(
            f"the base of this LoRA run is not there: {init_from} (its init_from) does not exist. "
            "Say where it is: --config.init_from=DIR of train and eval, --init-from=DIR of "
            "finetune, --base=DIR of generate and merge-lora."
        )


def refuse_adapters(where: Any, lora_rank: int) -> None:
    """Raises CheckpointError for a LoRA run where a whole model is needed."""
    if lora_rank:
        raise CheckpointError(
            f"{where} holds adapters and not the model below them. Merge them first: "
            f"moejax merge-lora --workdir={where} --out=DIR."
        )


def is_hf_folder(path: pathlib.Path) -> bool:
    """Whether a folder is a model in a published format and no workdir of ours."""
    if not (path / "config.json").is_file() or layout.kept_elsewhere(path):
        return False
    return not layout.steps_in(path / layout.SUBDIR)


class CheckpointWeights:
    """Weights of one step (the newest of a workdir)."""

    def __init__(self, path: pathlib.Path):
        directory, step = layout.locate(path)
        self._step = directory / str(layout.steps_in(directory)[-1] if step is None else step)
        meta = reader.read_meta(self._step)
        cfg = build_section(RunConfig, meta["config"])
        refuse_adapters(path, cfg.lora.rank)
        self.model = cfg.model
        self.shapes = {
            name: tuple(shape)
            for name, (shape, _) in meta["leaves"].items()
            if name.split("/")[0] in ("params", "balance")
        }

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """These leaves in the types and shardings asked for; the rest is not read."""
        items: dict[str, dict[str, Any]] = {"params": {}, "rest": {}}
        for name, leaf in leaves.items():
            top, _, inner = name.partition("/")
            items["params" if top == "params" else "rest"][inner if top == "params" else name] = (
                leaf
            )
        wanted = {item: layout.nest(named) for item, named in items.items() if named}
        read = reader.read_arrays(self._step, wanted)
        out = {f"params/{n}": a for n, a in layout.named_leaves(read.get("params", {})).items()}
        return out | layout.named_leaves(read.get("rest", {}))

    def keep_for_export(self, workdir: pathlib.Path) -> None:
        """Copies the side files of the import that the weights go back to, where there was one."""
        side = self._step.parent.parent / HF_FOLDER
        if not side.is_dir() or (workdir / HF_FOLDER).exists():
            return
        shutil.copytree(side, workdir / HF_FOLDER)
        carried = carried_file(self._step)
        if carried is not None:
            shutil.copyfile(carried, workdir / HF_FOLDER / CARRIED)


class HfWeights:
    """Weights of a Hugging Face folder, read straight into each device's share."""

    def __init__(self, path: pathlib.Path, *, packed: bool = False, vision: bool = True):
        carried = () if vision else ("vision_tower.",)
        self._source = HfSource(path, allow_unexpected=carried, packed=packed)
        self.model = self._source.cfg
        self._inner: dict[str, str] = {}
        for top, tree in (
            ("params", self._source.parts.params),
            ("balance", self._source.parts.balance),
        ):
            self._inner |= {f"{top}/{name}": name for name in layout.named_leaves(tree)}
        self.shapes = {n: self._source.map.leaves[inner].shape for n, inner in self._inner.items()}

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """These leaves in the types and shardings asked for."""
        return {
            name: self._source.load_leaf(self._inner[name], leaf) for name, leaf in leaves.items()
        }

    def keep_for_export(self, workdir: pathlib.Path) -> None:
        """Writes the side files as an import would."""
        folder = workdir / HF_FOLDER
        if not folder.exists():
            write_side_files(self._source, folder)
            carry_to(self._source, folder / CARRIED)


def total_values(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Numbers in these leaves."""
    return sum(int(np.prod(shape)) for shape in shapes.values())
