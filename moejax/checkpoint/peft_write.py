"""Writing an adapter in PEFT's form."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.partial import free_folder, written_whole
from moejax.checkpoint.peft_config import TENSORS, write_config
from moejax.checkpoint.peft_names import FOREIGN, PeftNames
from moejax.checkpoint.peft_packing import LowRank, pack_experts
from moejax.checkpoint.safetensors_file import SafetensorsWriter
from moejax.lora import LinearMap
from moejax.lora.maps import TOWER

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
NAMES = ("transformers", "checkpoint")
# Names that no target of ours may end like.
_NEVER = ("lm_head", "model.embed_tokens", "model.norm.weight", "input_layernorm.weight")


class AdapterFile(NamedTuple):
    """What was written: the folder, adapters, values, bytes of the tensors."""

    out: pathlib.Path
    num_adapters: int
    num_values: int
    total_bytes: int


def write_peft(
    out: str | pathlib.Path,
    names: PeftNames,
    shapes: Mapping[str, tuple[int, float]],
    read: Callable[[str], LowRank],
    *,
    spelling: str = "transformers",
    dtype: str = "float32",
    rslora: bool = False,
    dropout: float = 0.0,
    base: str | None = None,
) -> AdapterFile:
    """Writes adapter_config.json and adapter_model.safetensors, one adapter in memory.

    Args:
      out: a folder that does not exist or is empty.
      names: the maps of the model.
      shapes: name of every adapted map -> (rank, scale).
      read: gives the adapter of a map, of that rank.
      spelling: "transformers": module names of the family's class there (of a family without one,
        those of its checkpoint); "checkpoint": those of its checkpoint, an expert each.
      dtype: of the tensors.
      rslora, dropout, base: for adapter_config.json.
    Raises:
      CheckpointError: `out` is in the way, or nothing is adapted. Nothing half-written stays.
    """
    for option, value, allowed in (("names", spelling, NAMES), ("dtype", dtype, tuple(DTYPES))):
        if value not in allowed:
            raise CheckpointError(f"--{option}={value} is not one of {', '.join(allowed)}.")
    if not shapes:
        raise CheckpointError("no adapter changes anything: there is nothing to write.")
    out = free_folder(out)
    memory = spelling == "transformers" and names.memory is not None
    if memory and any(names.maps[name].stack == TOWER for name in shapes):
        raise CheckpointError(
            "transformers has the vision tower's maps cut otherwise: adapters on it are written "
            "with --names=checkpoint."
        )
    writer = _Writer(names, memory, DTYPES[dtype])
    with written_whole(out) as partial:
        plan = [row for name in shapes for row in writer.plan(name, shapes)]
        file = SafetensorsWriter(partial / TENSORS, plan)
        for name in shapes:
            for key, array in writer.tensors(name, read(name), shapes):
                file.add(key, array)
        file.close()
        write_config(
            partial, writer.chosen(shapes), writer.others(shapes), rslora=rslora, dropout=dropout,
            base=base,
        )  # fmt: skip
    values = sum(int(np.prod(shape)) for _, _, shape in plan)
    return AdapterFile(out, len(shapes), values, values * DTYPES[dtype].itemsize)


class _Writer:
    """Names and shapes of tensors in one spelling."""

    def __init__(self, names: PeftNames, memory: bool, dtype: np.dtype):
        self.names, self.memory, self.dtype = names, memory, dtype

    def plan(
        self, name: str, shapes: Mapping[str, tuple[int, float]]
    ) -> Iterator[tuple[str, np.dtype, tuple[int, ...]]]:
        """(key, dtype, shape) of the tensors of a map's adapter."""
        one, (rank, _) = self.names.maps[name], shapes[name]
        for path, repeats, out in self._paths(one, shapes):
            yield f"{path}.lora_A.weight", self.dtype, (repeats * rank, one.in_size)
            yield f"{path}.lora_B.weight", self.dtype, (out, repeats * rank)

    def tensors(
        self, name: str, low: LowRank, shapes: Mapping[str, Any]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The same keys with their values."""
        one = self.names.maps[name]
        pairs: Iterator[tuple[np.ndarray, np.ndarray]]
        if one.num_experts and self.memory:
            pairs = iter([pack_experts(low)])
        elif one.num_experts:
            halves = len(self.names.expert_words(one))
            parts = [np.split(low.b[e], halves) for e in range(one.num_experts)]
            pairs = ((low.a[e], b) for e, own in enumerate(parts) for b in own)
        else:
            pairs = iter([(low.a, low.b)])
        for (path, _, _), (a, b) in zip(self._paths(one, shapes), pairs, strict=True):
            yield f"{path}.lora_A.weight", a.astype(self.dtype)
            yield f"{path}.lora_B.weight", b.astype(self.dtype)

    def _paths(self, one: LinearMap, shapes: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
        """(path, experts packed together, rows of B) of every pair of tensors."""
        path = f"base_model.model.{self.names.path(one, memory=self.memory)}"
        if one.num_experts and self.memory:
            # PEFT wraps gate_up_proj first and down_proj around it; the outer one has the name.
            outer = one.name.removesuffix("gate_up_proj") + "down_proj"
            inside = one.name != outer and outer in shapes
            yield path + (".base_layer" if inside else ""), one.num_experts, one.out_size
        elif one.num_experts:
            words = self.names.expert_words(one)
            for e in range(one.num_experts):
                for word in words:
                    own = self.names.expert_path(one, e, word)
                    yield f"base_model.model.{own}", 1, one.out_size // len(words)
        else:
            yield path, 1, one.out_size

    def chosen(self, shapes: Mapping[str, tuple[int, float]]) -> dict[str, tuple[int, float, bool]]:
        """Targets of PEFT, each with rank and scale."""
        return {
            want.name: (rank, scale, want.parameter)
            for name, (rank, scale) in shapes.items()
            for want in self.names.wanted(self.names.maps[name], memory=self.memory)
        }

    def others(self, shapes: Mapping[str, Any]) -> Iterator[str]:
        """Everything else in the model that a target could reach."""
        yield from _NEVER
        foreign = FOREIGN.get(self.names.model_type, ())
        yield from (name for name in foreign if name not in self.names.maps)
        for name, one in self.names.maps.items():
            if name not in shapes:
                for want in self.names.wanted(one, memory=self.memory):
                    yield want.name
