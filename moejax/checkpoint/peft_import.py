"""An adapter in PEFT's form as a LoRA config of ours, and as leaves of the model that it makes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moejax.checkpoint.layout import named_leaves
from moejax.checkpoint.peft_config import commonest, end_patterns, plain_number, shortest_ends
from moejax.checkpoint.peft_packing import LowRank
from moejax.checkpoint.peft_read import PeftFolder
from moejax.checkpoint.peft_run import to_tree, tree_path
from moejax.config import LoraConfig, RunConfig
from moejax.lora import LinearMap, adapted_parts, linear_maps
from moejax.lora.maps import TOWER
from moejax.models.hf_config import FAMILIES
from moejax.models.hf_config_write import family_name
from moejax.models.parts import ModelParts


class _Adapted(NamedTuple):
    """A map by the name that configs have for it, and in the file's family, with its adapter's."""

    name: str
    file_name: str
    rank: int
    scale: float


def lora_config(folder: PeftFolder, parts: ModelParts) -> LoraConfig:
    """The config whose adapters can hold those of a folder.

    Layers that one scan runs have one rank, the largest, and one scale, the first: zeros fill what
    a smaller one lacks, and B takes up the difference of scales, so that outputs are the same.

    Args:
      folder: the adapter.
      parts: of the base.
    """
    maps = linear_maps(parts, FAMILIES[family_name(parts.cfg)].spelling)
    adapted, shared_a = _adapted(folder, maps)
    by_name = {one.name: one for one in maps}
    groups: dict[tuple, list[_Adapted]] = {}
    for one in adapted:
        m = by_name[one.name]
        groups.setdefault((m.stack, m.run, m.path), []).append(one)
    ranks, alphas = {}, {}
    rslora = folder.config.rslora
    for members in groups.values():
        rank, scale = max(one.rank for one in members), members[0].scale
        for one in members:
            ranks[one.name] = rank
            alphas[one.name] = float(plain_number(scale * (rank**0.5 if rslora else rank)))
    rank, alpha = commonest(ranks.values()), commonest(alphas.values())
    plain = [m.name for m in maps if not m.num_experts]
    experts = [m.name for m in maps if m.num_experts]
    absorbed = any(
        by_name[n].num_experts or by_name[n].adapter == "kv_b_proj" or by_name[n].stack == TOWER
        for n in ranks
    )
    return LoraConfig(
        rank=rank, alpha=alpha, rslora=rslora, shared_a=shared_a,
        dropout=0.0 if absorbed else float(folder.config.dropout),
        targets=_targets(plain, ranks), target_parameters=_targets(experts, ranks),
        rank_pattern=_entries(end_patterns(ranks, rank)),
        alpha_pattern=_entries(end_patterns(alphas, alpha)),
    )  # fmt: skip


def tree_leaves(folder: PeftFolder, cfg: RunConfig) -> dict[str, np.ndarray]:
    """Values of every adapter's leaves, by name (`params/...`), of the model that `cfg` makes."""
    parts, selection = adapted_parts(cfg)
    assert selection is not None
    file_names = _file_names(folder)
    shapes = {f"params/{n}": leaf.shape for n, leaf in named_leaves(parts.params).items()}
    leaves: dict[str, np.ndarray] = {}
    for target in selection.targets:
        one = target.map
        low = folder.read(file_names[_place(one)]).scaled(target.scale)
        keys = [f"params/{tree_path(one)}/{side}" for side in "ab"]
        sides = to_tree(low, *(shapes[key][len(one.place) :] for key in keys))
        for key, values in zip(keys, sides, strict=True):
            leaf = leaves.setdefault(key, np.zeros(shapes[key], np.float32))
            leaf[one.place] = values
    return leaves


def _adapted(folder: PeftFolder, maps: list[LinearMap]) -> tuple[list[_Adapted], bool]:
    """The adapted maps, and whether all experts of each share their A."""
    found, file_names = set(folder.maps()), _file_names(folder)
    out, experts, shared = [], 0, True
    for one in maps:
        file_name = file_names[_place(one)]
        if file_name in found:
            low: LowRank = folder.read(file_name)
            out.append(_Adapted(one.name, file_name, low.rank, low.scale))
            if one.num_experts:
                experts += 1
                shared = shared and bool((low.a == low.a[:1]).all())
    return out, shared and experts > 0


def _file_names(folder: PeftFolder) -> dict[tuple, str]:
    return {_place(one): name for name, one in folder.names.maps.items()}


def _place(one: LinearMap) -> tuple:
    return one.stack, one.run, one.place, one.path


def _targets(among: list[str], chosen: dict[str, int]) -> tuple[str, ...]:
    own = [name for name in among if name in chosen]
    ends = shortest_ends(own, [name for name in among if name not in chosen])
    return tuple(sorted(set(ends.values())))


def _entries(patterns: dict[str, float]) -> tuple[str, ...]:
    return tuple(f"{pattern}={value!r}" for pattern, value in patterns.items())
