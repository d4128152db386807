"""Reading an adapter in PEFT's form: two files, every name and shape of them checked."""

from __future__ import annotations

import pathlib
import re
from typing import NamedTuple

import numpy as np

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.peft_config import CONFIG, TENSORS, ends_with_one, read_config
from moejax.checkpoint.peft_names import PeftNames, Place
from moejax.checkpoint.peft_packing import LowRank, join_halves, stack_experts, unpack_experts
from moejax.checkpoint.safetensors_file import SafetensorsFile, shown

_KEY = re.compile(r"base_model\.model\.(.{1,300})\.lora_([AB])\.weight")
_FLOATS = ("F32", "BF16", "F16")


class _Pair(NamedTuple):
    """One A and B of the file: path of the module, what it means, rank and scale."""

    path: str
    place: Place
    rank: int
    scale: float
    fused: bool


class PeftFolder:
    """A checked adapter; tensors are read when asked for.

    Attributes:
      path: the folder.
      config: what adapter_config.json says.
      names: the maps of the model it is for.
    """

    def __init__(self, path: str | pathlib.Path, names: PeftNames):
        """
        Raises:
          CheckpointError: a file is missing or damaged, a tensor belongs to no map of the model or
            has another shape, or the adapter is of a kind that is not read.
        """
        self.path, self.names = pathlib.Path(path).expanduser(), names
        self._check_files()
        self.config = read_config(self.path)
        self._file = SafetensorsFile(self.path / TENSORS)
        self._pairs: dict[str, dict[Place, _Pair]] = {}
        table = names.places()
        for path in self._paths():
            pair = self._pair(path, table.find(path.replace(".base_layer", "")))
            found = self._pairs.setdefault(pair.place.map, {})
            whole = pair.place.expert < 0 or Place(pair.place.map) in found
            if pair.place in found or (found and whole):
                other = found.get(pair.place) or next(iter(found.values()))
                raise self._wrong(path, f"is there twice: {shown(other.path)} is the same map")
            found[pair.place] = pair
        if not self._pairs:
            raise CheckpointError(f"{self._file.path} has no adapter in it.")

    def maps(self) -> list[str]:
        """Names of the maps that have an adapter, in the order of layers."""
        return [name for name in self.names.maps if name in self._pairs]

    def read(self, name: str) -> LowRank:
        """The adapter of a map."""
        pairs = self._pairs[name]
        whole = pairs.get(Place(name))
        if whole is not None:
            a, b = self._tensors(whole.path)
            if whole.fused:
                return unpack_experts(a, b, self.names.maps[name].num_experts, whole.scale)
            return LowRank(a, b, whole.scale)
        return stack_experts(
            [self._expert(pairs, name, e) for e in range(self.names.maps[name].num_experts)]
        )

    def _expert(self, pairs: dict[Place, _Pair], name: str, expert: int) -> LowRank | None:
        halves = [pairs.get(Place(name, expert, half)) for half in (-1, 0, 1)]
        down, gate, up = (h and LowRank(*self._tensors(h.path), h.scale) for h in halves)
        if down is not None or (gate is None and up is None):
            return down
        return join_halves(gate, up, self.names.maps[name].out_size // 2)

    def _tensors(self, path: str) -> tuple[np.ndarray, np.ndarray]:
        a, b = (self._file.read(_key(path, side)).astype(np.float32) for side in "AB")
        return a, b

    def _check_files(self) -> None:
        if not self.path.is_dir():
            raise CheckpointError(f"no adapter at {self.path}: there is no such folder.")
        for name in (CONFIG, TENSORS):
            if not (self.path / name).is_file():
                pickled = (self.path / "adapter_model.bin").exists() and name == TENSORS
                hint = (
                    " adapter_model.bin is a pickle, which can run code and is not opened: save "
                    "the adapter as safetensors." if pickled else ""
                )  # fmt: skip
                raise CheckpointError(f"{self.path} is no PEFT adapter: {name} is missing.{hint}")

    def _paths(self) -> list[str]:
        """Module paths of the file, each with both its tensors."""
        sides: dict[str, set[str]] = {}
        for key, info in self._file.tensors.items():
            match = _KEY.fullmatch(key)
            if match is None:
                raise CheckpointError(
                    f"{self._file.path}, key {shown(key)}: only lora_A and lora_B of linear maps "
                    "are read (base_model.model.<module>.lora_A.weight)."
                )
            if info.dtype not in _FLOATS or len(info.shape) != 2:
                raise CheckpointError(
                    f"{self._file.path}, key {shown(key)}: {info.dtype}{list(info.shape)} is no "
                    f"matrix of {', '.join(_FLOATS)}."
                )
            sides.setdefault(match[1], set()).add(match[2])
        for path, found in sides.items():
            if len(found) < 2:
                missing = "A" if found == {"B"} else "B"
                raise self._wrong(path, f"has no lora_{missing}")
        return list(sides)

    def _pair(self, path: str, places: list[Place]) -> _Pair:
        """What a path is, by its name and, of fused experts, its shapes."""
        if not places:
            example = next(iter(self.names.maps.values()))
            like = self.names.path(example, memory=True)
            raise self._wrong(
                path,
                f"is no linear map of this {self.names.model_type} model (names are like {like})",
            )
        a, b = (self._file.tensors[_key(path, side)].shape for side in "AB")
        for place in places:
            one = self.names.maps[place.map]
            fused = one.num_experts > 0 and place.expert < 0
            width, out = one.in_size, one.out_size // (2 if place.half >= 0 else 1)
            repeats = one.num_experts if fused else 1
            rank = a[0] // repeats
            if rank and a == (rank * repeats, width) and b == (out, rank * repeats):
                return _Pair(path, place, rank, self._scale(path, place, fused, rank), fused)
        raise self._wrong(
            path, f"has A {list(a)} and B {list(b)}, but the map is {self._sizes(places)}"
        )

    def _sizes(self, places: list[Place]) -> str:
        sizes = []
        for place in places:
            one = self.names.maps[place.map]
            out = one.out_size // (2 if place.half >= 0 else 1)
            many = one.num_experts if place.expert < 0 else 0
            sizes.append(f"{f'{many} x ' if many else ''}[{out}, {one.in_size}]")
        return " or ".join(sizes)

    def _scale(self, path: str, place: Place, fused: bool, rank: int) -> float:
        path = path.replace(".base_layer", "")
        name = self.config.targeted(path)
        if fused:
            name = f"{path}.{self.names.maps[place.map].adapter}"
            name = name if ends_with_one(name, self.config.parameters) else None
        if name is None:
            raise self._wrong(
                path, f"is no target in {CONFIG} (target_modules, target_parameters), and PEFT "
                "would leave its tensors out"
            )  # fmt: skip
        if self.config.rank_of(name) != rank:
            raise self._wrong(
                path, f"has rank {rank}, but {CONFIG} says {self.config.rank_of(name)}"
            )
        return self.config.scale_of(name, rank)

    def _wrong(self, path: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: {shown(path)} {what}.")


def _key(path: str, side: str) -> str:
    return f"base_model.model.{path}.lora_{side}.weight"
