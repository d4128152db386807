"""Every linear map of a model that an adapter can sit on, under its published name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from moejax.models.decoder import layer_kinds
from moejax.models.grouping import LayerKind, layer_places
from moejax.models.hf_keys import DEEPSEEK, VISION_BLOCK, Spelling, TensorRule, layer_rules
from moejax.models.parts import ModelParts

TOWER = -1  # in the place of a stack's number
# Of a block of the tower: module name, the parameter.
_TOWER_MAPS = (("wqkv", "qkv"), ("wo", "o"), ("mlp.fc0", "fc0"), ("mlp.fc1", "fc1"))


class LinearMap(NamedTuple):
    """One linear map of one layer.

    Attributes:
      name: the module's name in published checkpoints; of routed experts, which PEFT adapts as one
        parameter, `....experts.gate_up_proj` and `....experts.down_proj`.
      kind: what kind of layer part it belongs to, in words.
      layer: number of the layer.
      stack, run: where the layer's parameters are stacked, and `place` [repeat, count] in there; of
        a block of the vision tower, TOWER, 0 and its number.
      owner: path from the layer to the module that holds the map.
      adapter: name of the adapter beside it, the same in every family's spelling.
      leaves: the parameters it consists of; of several, the last dims stand behind each other.
      at: its place in the second dim of a parameter that holds gate and up.
      in_size, out_size: width of inputs and outputs; of routed experts, of one expert.
      num_experts: routed experts that it stands for; 0 for a single map.
    """

    name: str
    kind: str
    layer: int
    stack: int
    run: int
    place: tuple[int, ...]
    owner: tuple[str, ...]
    adapter: str
    leaves: tuple[str, ...]
    at: int | None
    in_size: int
    out_size: int
    num_experts: int = 0

    @property
    def path(self) -> str:
        """Dotted name of the adapter in the parameter tree, without its layer's stack and run."""
        return ".".join((*self.owner, "lora", self.adapter))


def linear_maps(parts: ModelParts, spelling: Spelling) -> list[LinearMap]:
    """All maps that can have an adapter, in the order of layers; last those of a vision tower.

    Not among them: embedding and output head, norms, convolutions, decay rates.
    """
    kinds = layer_kinds(parts.cfg)
    found = []
    for layer, (stack, run, place) in enumerate(layer_places(parts.segments)):
        leaves = parts.params[f"stack{stack}"][f"run{run}"]
        at = (layer, stack, run, place)
        for rule in layer_rules(kinds[layer].attention, kinds[layer].ffn):
            one = _linear(rule, leaves, spelling, kinds[layer], at)
            if one is not None:
                found.append(one)
        found += _expert_maps(leaves, spelling, at)
    return found + _tower_maps(parts)


def _tower_maps(parts: ModelParts) -> list[LinearMap]:
    """The maps of the vision tower's blocks, where there is one."""
    found = []
    for layer in range(parts.cfg.vision.num_layers):
        leaves = parts.params["vision"]["blocks"]
        for module, leaf in _TOWER_MAPS:
            in_size, *out = leaves[leaf].shape[1:]
            found.append(
                LinearMap(
                    name=f"{VISION_BLOCK}{layer}.{module}", kind="vision tower", layer=layer,
                    stack=TOWER, run=0, place=(layer,), owner=(),
                    adapter=module.rpartition(".")[2], leaves=(leaf,), at=None, in_size=in_size,
                    out_size=math.prod(out),
                )
            )  # fmt: skip
    return found


def _linear(
    rule: TensorRule, leaves: dict, spelling: Spelling, kind: LayerKind, where: tuple
) -> LinearMap | None:
    """The map that a stored tensor is, None for another tensor or one that the layer lacks."""
    groups = re.findall(r"\([^)]*\)|\S+", rule.theirs)
    is_matrix = len(groups) == 2 and groups[0] != "1" and rule.name.endswith(".weight")
    if not is_matrix or "{e}" in rule.name:
        return None
    paths = [part.leaf.split(".") for part in rule.parts]
    shapes = [_shape(leaves, path) for path in paths]
    if any(shape is None for shape in shapes):
        return None
    fixed = [int(dim) for dim in rule.parts[0].dims.split() if dim.isdigit()]
    out = [shape[2 if fixed else 1 :] for shape in shapes]
    layer, stack, run, place = where
    owner = tuple(paths[0][:-1])
    return LinearMap(
        name=f"{spelling.prefix}model.layers.{layer}.{_module(rule, spelling)}",
        kind=_kind(owner, kind), layer=layer, stack=stack, run=run, place=place, owner=owner,
        adapter=_module(rule, DEEPSEEK).rpartition(".")[2],
        leaves=tuple(path[-1] for path in paths), at=fixed[0] if fixed else None,
        in_size=shapes[0][0], out_size=sum(math.prod(dims) for dims in out),
    )  # fmt: skip


def _expert_maps(leaves: dict, spelling: Spelling, where: tuple) -> Iterator[LinearMap]:
    layer, stack, run, place = where
    for leaf, adapter in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        shape = _shape(leaves, ["ffn", "experts", leaf])
        if shape is not None:
            num_experts, width, *out = shape
            packed = 2 if _dtype(leaves, ["ffn", "experts", leaf]) == "uint8" else 1
            yield LinearMap(
                name=f"{spelling.prefix}model.layers.{layer}.{spelling.moe}.experts.{adapter}",
                kind="routed experts", layer=layer, stack=stack, run=run, place=place,
                owner=("ffn", "experts"), adapter=adapter, leaves=(leaf,), at=None,
                in_size=width * packed, out_size=math.prod(out), num_experts=num_experts,
            )  # fmt: skip


def _module(rule: TensorRule, spelling: Spelling) -> str:
    return rule.name.format_map(dataclasses.asdict(spelling)).removesuffix(".weight")


def _leaf(leaves: dict, path: list[str]) -> Any:
    node: Any = leaves
    for word in path:
        node = node.get(word) if isinstance(node, dict) else None
    return node


def _shape(leaves: dict, path: list[str]) -> Any:
    """Shape of one layer's parameter, None where there is none."""
    leaf = _leaf(leaves, path)
    return None if leaf is None else leaf.shape[2:]


def _dtype(leaves: dict, path: list[str]) -> str:
    return str(_leaf(leaves, path).dtype)


def _kind(owner: tuple[str, ...], kind: LayerKind) -> str:
    if owner[0] == "attn":
        return "indexer" if "indexer" in owner else f"{kind.attention} attention"
    named = {"router": "router", "shared": "shared experts"}.get(owner[-1])
    return named or ("latent maps" if kind.ffn == "moe" else "dense feed-forward")
