"""Adapters and the names that PEFT files have for them.

A map has up to two published spellings: the modules of its checkpoint (`block_sparse_moe`,
`experts.5.w1`) and those of the family's class in transformers (`mlp`, fused `experts`), which PEFT
wraps and whose names its files bear. Both are read; which one is written is the family's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moejax.lora import LinearMap, linear_maps
from moejax.lora.maps import TOWER
from moejax.models.hf_keys import Spelling
from moejax.models.parts import ModelParts


@dataclasses.dataclass(frozen=True)
class MemoryNames:
    """How a family's class in transformers calls its modules, where not as its checkpoint does.

    Attributes:
      layers: path of the list of layers.
      words: words of the checkpoint's module paths -> words in memory.
      parameters: last words of maps that PEFT reaches as parameters only, by `target_parameters`:
        routers are no `nn.Linear`; and where the class is one that older files knew unfused, PEFT
        takes a target called like an expert's map for the experts themselves.
    """

    layers: str = "model.layers"
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    parameters: tuple[str, ...] = ("gate",)


_GLU = ("gate_proj", "up_proj", "down_proj")
_DEEPSEEK = MemoryNames(parameters=("gate", *_GLU))
# model_type -> names; families without a class in transformers (kimi_k3, kimi_k2) are not here.
MEMORY: Mapping[str, MemoryNames] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "kimi_k25": MemoryNames("model.language_model.layers"),
    "kimi_linear": MemoryNames(
        words={
            "block_sparse_moe": "mlp",
            "self_attn.f_a_proj": "self_attn.forget_gate.f_a_proj",
            "self_attn.f_b_proj": "self_attn.forget_gate.f_b_proj",
        }
    ),
    "bailing_hybrid": MemoryNames(
        words={
            "attention": "self_attn",
            "self_attn.dense": "self_attn.o_proj",
            "self_attn.f_proj": "self_attn.forget_gate.f_proj",
        }
    ),
}
# Linear maps outside the language model: a target must not reach them by accident.
FOREIGN: Mapping[str, tuple[str, ...]] = {
    "kimi_k25": tuple(
        f"model.vision_tower.layers.0.{name}"
        for name in ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.proj", "mlp.fc1", "mlp.fc2")
    ),
    "kimi_k3": tuple(
        f"vision_tower.encoder.blocks.0.{name}" for name in ("wqkv", "wo", "mlp.fc0", "mlp.fc1")
    ),
}


class Place(NamedTuple):
    """What a module path of a file means: a map, and of single experts which one and which half.

    Attributes:
      map: name of the map, as `LinearMap.name`.
      expert: -1 for a map that is whole.
      half: 0 for an expert's gate, 1 for its up, -1 otherwise.
    """

    map: str
    expert: int = -1
    half: int = -1


class Wanted(NamedTuple):
    """What PEFT is to target for a map: a module's name, or a parameter's."""

    name: str
    parameter: bool


class PeftNames:
    """The maps of a model that can have adapters, and their paths in files of its family.

    Attributes:
      maps: name -> map, in the order of layers.
      memory: names in transformers; None where it has no class for the family.
    """

    def __init__(self, parts: ModelParts, spelling: Spelling, model_type: str):
        self.model_type, self.spelling = model_type, spelling
        self.memory = MEMORY.get(model_type)
        self.maps: dict[str, LinearMap] = {one.name: one for one in linear_maps(parts, spelling)}

    def path(self, one: LinearMap, *, memory: bool) -> str:
        """Module path of a map, of the experts' the one of all of them."""
        path = one.name.rpartition(".")[0] if one.num_experts else one.name
        if not memory or self.memory is None or one.stack == TOWER:
            return path
        _, layer, rest = re.split(r"\blayers\.(\d+)\.", path, maxsplit=1)
        for word, other in self.memory.words.items():
            rest = re.sub(rf"(?<![^.]){re.escape(word)}(?![^.])", other, rest)
        return f"{self.memory.layers}.{layer}.{rest}"

    def expert_words(self, one: LinearMap) -> tuple[str, ...]:
        """Names of a single expert's matrices that a map of the experts consists of."""
        words = self.spelling
        return (words.w_down,) if one.adapter == "down_proj" else (words.w_gate, words.w_up)

    def expert_path(self, one: LinearMap, expert: int, word: str) -> str:
        """Module path of one expert's matrix in the checkpoint's spelling."""
        return f"{self.path(one, memory=False)}.{expert}.{word}"

    def wanted(self, one: LinearMap, *, memory: bool) -> Iterator[Wanted]:
        """What PEFT is to target for a map: one thing, or a module of every expert."""
        memory = memory and self.memory is not None
        path = self.path(one, memory=memory)
        if one.num_experts and memory:
            yield Wanted(f"{path}.{one.adapter}", True)
        elif one.num_experts:
            for e in range(one.num_experts):
                for word in self.expert_words(one):
                    yield Wanted(self.expert_path(one, e, word), False)
        elif memory and self.memory and path.rpartition(".")[2] in self.memory.parameters:
            yield Wanted(f"{path}.weight", True)
        else:
            yield Wanted(path, False)

    def places(self) -> PlaceTable:
        """What module paths mean, in every spelling that is read."""
        return PlaceTable(self)


class PlaceTable:
    """Module paths of a file -> maps: the checkpoint's spelling or that of transformers."""

    def __init__(self, names: PeftNames):
        self._names = names
        self._paths: dict[str, list[Place]] = {}
        for one in names.maps.values():
            paths = {names.path(one, memory=memory) for memory in (False, True)}
            paths |= {path.removeprefix(names.spelling.prefix) for path in paths}
            for path in paths:
                self._paths.setdefault(path, []).append(Place(one.name))

    def find(self, path: str) -> list[Place]:
        """What a path can mean; of fused experts two maps, which shapes tell apart."""
        if path in self._paths:
            return self._paths[path]
        match = re.fullmatch(r"(.{1,200}\.experts)\.(\d{1,7})\.(\w{1,40})", path)
        found = []
        for place in self._paths.get(match[1], ()) if match else ():
            one = self._names.maps[place.map]
            words = self._names.expert_words(one)
            if match and int(match[2]) < one.num_experts and match[3] in words:
                half = words.index(match[3]) if len(words) > 1 else -1
                found.append(Place(one.name, int(match[2]), half))
        return found
