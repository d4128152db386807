"""From the config's targets to adapters: PEFT's rule of suffixes, and regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moejax.config import ConfigError, LoraConfig, nearest
from moejax.config.lora import pattern_matches
from moejax.layers.adapter import AdapterSpec
from moejax.lora.maps import TOWER, LinearMap
from moejax.models.decoder import AdapterPlan
from moejax.models.grouping import Segment


class Target(NamedTuple):
    """A map that gets an adapter, its rank, and what the product is multiplied by."""

    map: LinearMap
    rank: int
    scale: float


class Selection(NamedTuple):
    """What a config's targets come to.

    Attributes:
      targets: in the order of layers.
      plan: the same as the decoder takes it.
      vision: those of every block of the vision tower.
      warnings: a line for every target that names maps of several kinds, and for every setting
        without effect.
    """

    targets: list[Target]
    plan: AdapterPlan
    warnings: list[str]
    vision: tuple[AdapterSpec, ...] = ()


def select_adapters(
    cfg: LoraConfig, maps: Sequence[LinearMap], segments: Sequence[Segment]
) -> Selection:
    """The adapters that the config asks for.

    A map is a target if its name is an entry of `targets` or ends in a dot and one (PEFT's rule),
    or if `target_regex` matches all of it; routed experts only by `target_parameters`, the same
    rule, as in PEFT, where they are parameters and no modules.

    Raises:
      ConfigError: a target that matches nothing, or nothing targeted; several kinds under
        `strict`; neighbours in a scan with different scales.
    """
    plain = [m for m in maps if not m.num_experts]
    experts = [m for m in maps if m.num_experts]
    chosen: dict[str, LinearMap] = {}
    warnings = []
    for field, among in (("targets", plain), ("target_parameters", experts)):
        for target in getattr(cfg, field):
            found = [m for m in among if m.name == target or m.name.endswith("." + target)]
            if not found:
                raise ConfigError(_no_match(field, target, among, experts))
            kinds = list(dict.fromkeys(m.kind for m in found))
            if len(kinds) > 1:
                warnings.append(
                    f"lora.{field}: {target!r} matches {len(found)} maps of {len(kinds)} kinds: "
                    f"{', '.join(kinds)}"
                )
            chosen |= {m.name: m for m in found}
    if cfg.target_regex:
        found = [m for m in plain if re.fullmatch(cfg.target_regex, m.name)]
        if not found:
            raise ConfigError(_no_match("target_regex", cfg.target_regex, plain, experts))
        chosen |= {m.name: m for m in found}
    if warnings and cfg.strict:
        raise ConfigError(
            warnings[0] + ". Name them apart (lora.target_regex), or set lora.strict=False."
        )
    if not chosen:
        raise ConfigError(
            f"lora.rank={cfg.rank} but nothing is targeted: set lora.targets, for instance "
            "('q_proj', 'k_proj', 'gate'), lora.target_regex or lora.target_parameters."
        )
    _check_dropout(cfg, chosen.values())
    targets = [
        Target(m, cfg.rank_of(m.name), cfg.scale_of(m.name)) for m in maps if m.name in chosen
    ]
    on_tower = [target for target in targets if target.map.stack == TOWER]
    others = [target for target in targets if target.map.stack != TOWER]
    plan, vision = _plan(cfg, others, segments), _vision_plan(cfg, on_tower, maps)
    return Selection(targets, plan, warnings + _idle(cfg, targets), vision)


def _idle(cfg: LoraConfig, targets: Sequence[Target]) -> list[str]:
    """A line for every setting that no adapter feels."""
    lines = [
        f"lora.{field}: {entry!r} matches no adapted map and has no effect"
        for field in ("rank_pattern", "alpha_pattern")
        for entry in getattr(cfg, field)
        if not any(pattern_matches(entry, t.map.name) for t in targets)
    ]
    if cfg.shared_a and not any(t.map.num_experts for t in targets):
        lines.append("lora.shared_a has no effect: no routed experts are in lora.target_parameters")
    return lines


def _no_match(
    field: str, target: str, among: Iterable[LinearMap], experts: Sequence[LinearMap]
) -> str:
    words = sorted({m.name.rpartition(".")[2] for m in among})
    example = next(iter(among), None)
    if field == "targets" and any(m.name.endswith("." + target) for m in experts):
        return (
            f"lora.targets: {target!r} are routed experts, which PEFT names as parameters: put it "
            "into lora.target_parameters."
        )
    close = nearest(target, words)
    hint = f"nearest: {', '.join(close)}" if close else f"there are {', '.join(words) or 'none'}"
    like = f" (names are like {example.name!r})" if example else ""
    return f"lora.{field}: {target!r} matches no linear map; {hint}{like}."


def _check_dropout(cfg: LoraConfig, chosen: Iterable[LinearMap]) -> None:
    """Maps that no input passes through on its own have nothing to drop."""
    if not cfg.dropout:
        return
    for one in chosen:
        if one.stack == TOWER:
            raise ConfigError(
                f"lora.dropout={cfg.dropout} does not go with an adapter on {one.name}: the vision "
                "tower has no dropout. Set lora.dropout=0, or leave the map out."
            )
        if one.num_experts or one.adapter == "kv_b_proj":
            raise ConfigError(
                f"lora.dropout={cfg.dropout} does not go with an adapter on {one.name}: "
                + ("routed experts read" if one.num_experts else "absorbed attention reads")
                + " the map itself. Set lora.dropout=0, or leave the map out."
            )


def _plan(cfg: LoraConfig, targets: Sequence[Target], segments: Sequence[Segment]) -> AdapterPlan:
    """Adapters of every stack's runs."""
    groups: dict[tuple, list[Target]] = {}
    for target in targets:
        m = target.map
        groups.setdefault((m.stack, m.run, m.owner, m.adapter), []).append(target)
    plan: list[list[list[AdapterSpec]]] = [[[] for _ in s.runs] for s in segments]
    for (stack, run, owner, adapter), members in groups.items():
        segment = segments[stack]
        first = members[0]
        ranks = [[0] * segment.runs[run].count for _ in range(segment.repeats)]
        for member in members:
            if member.scale != first.scale:
                raise ConfigError(
                    f"lora: {first.map.name} and {member.map.name} are layers of one scan, and "
                    f"their adapters have scales {first.scale:g} and {member.scale:g}. Give such "
                    "layers one lora.alpha_pattern (and, as the scale depends on it, one rank)."
                )
            repeat, count = member.map.place
            ranks[repeat][count] = member.rank
        plan[stack][run].append(
            AdapterSpec(
                owner,
                adapter,
                first.map.leaves,
                first.map.at,
                max(m.rank for m in members),
                first.scale,
                tuple(map(tuple, ranks)),
                cfg.init,
                cfg.shared_a and first.map.num_experts > 0,
            )  # fmt: skip
        )
    return tuple(tuple(tuple(specs) for specs in runs) for runs in plan)


def _vision_plan(
    cfg: LoraConfig, targets: Sequence[Target], maps: Sequence[LinearMap]
) -> tuple[AdapterSpec, ...]:
    """Adapters of the tower's blocks, which are one loop: all of them have the same."""
    groups: dict[str, list[Target]] = {}
    for target in targets:
        groups.setdefault(target.map.adapter, []).append(target)
    blocks = len({one.layer for one in maps if one.stack == TOWER})
    specs = []
    for adapter, members in groups.items():
        first = members[0]
        alike = {(member.rank, member.scale) for member in members}
        if len(members) != blocks or len(alike) > 1:
            raise ConfigError(
                f"lora: the blocks of the vision tower are one loop, and {adapter!r} has adapters "
                f"in {len(members)} of {blocks}, of {len(alike)} ranks or scales. Target it in all "
                "blocks, with one rank and one alpha."
            )
        specs.append(
            AdapterSpec(
                (), adapter, first.map.leaves, None, first.rank, first.scale, ((first.rank,),),
                cfg.init,
            )
        )  # fmt: skip
    return tuple(specs)
