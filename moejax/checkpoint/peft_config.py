"""`adapter_config.json`: what PEFT is told beside the tensors, written and read."""

from __future__ import annotations

import collections
import json
import math
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.safetensors_file import parse_json, shown

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 64 << 20
_MAX_PATTERN = 1000

# Keys that say nothing about the values of the tensors, or what the tensors show themselves.
_SILENT = frozenset(
    "auto_mapping base_model_name_or_path inference_mode megatron_core peft_version revision "
    "qalora_group_size task_type runtime_config exclude_modules eva_config peft_type r lora_alpha "
    "lora_dropout rank_pattern alpha_pattern use_rslora target_modules target_parameters".split()
)
# Other keys must be unset; what they would mean.
_UNSUPPORTED = {
    "use_dora": "DoRA scales the columns of the sum, which a plain adapter cannot hold",
    "use_qalora": "QALoRA pools the inputs",
    "lora_bias": "biases of B have no place here",
    "bias": "trained biases have no place here: no map of these models has one",
    "alora_invocation_tokens": "activated LoRA applies to some tokens only",
    "modules_to_save": "whole modules are no adapters; put them into the base",
    "trainable_token_indices": "trained rows of the embedding are no adapters",
    "layers_to_transform": "name the layers in target_modules",
    "layers_pattern": "name the layers in target_modules",
    "layer_replication": "the base has another number of layers",
    "fan_in_fan_out": "no map of these models is stored [in, out]",
    "init_lora_weights": "it changes the base too; let PEFT convert the adapter when it saves it",
}
_HARMLESS_INITS = (True, False, "gaussian", "eva", "orthogonal")


class PeftConfig(NamedTuple):
    """The part of an adapter_config.json that counts.

    Attributes:
      rank, alpha: where no pattern says otherwise.
      rank_pattern, alpha_pattern: ends of names (regular expressions) -> value.
      rslora: scale is alpha / sqrt(r) in place of alpha / r.
      dropout: of the inputs in training.
      modules: ends of names of adapted modules, or one regular expression for whole names.
      parameters: ends of names of adapted parameters.
    """

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    rslora: bool
    dropout: float
    modules: tuple[str, ...] | str
    parameters: tuple[str, ...]

    def rank_of(self, name: str) -> int:
        """Rank of the adapter on the module or parameter of this name."""
        return _matched(self.rank_pattern, name, self.rank)

    def scale_of(self, name: str, rank: int) -> float:
        """What the product of A and B is multiplied by."""
        alpha = _matched(self.alpha_pattern, name, self.alpha)
        return float(alpha / math.sqrt(rank)) if self.rslora else float(alpha / rank)

    def targeted(self, path: str) -> str | None:
        """The name under which PEFT adapts the module at `path`; None: it does not."""
        if ends_with_one(f"{path}.weight", self.parameters):
            return f"{path}.weight"
        # A regular expression is a stranger's program: what it matches, the tensors show as well.
        return path if isinstance(self.modules, str) or ends_with_one(path, self.modules) else None


def ends_with_one(name: str, ends: Iterable[str]) -> bool:
    """PEFT's rule for a list of targets."""
    return any(name == end or name.endswith(f".{end}") for end in ends)


def _matched(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def read_config(folder: pathlib.Path) -> PeftConfig:
    """adapter_config.json of a folder.

    Raises:
      CheckpointError: it is missing or damaged, or asks for something that is not supported.
    """
    path = folder / CONFIG
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} is larger than {_MAX_CONFIG_BYTES >> 20} MB.")
    raw = parse_json(data, str(path))
    _check_supported(raw, path)
    rank = _number(raw, "r", path, default=None)
    if rank != int(rank):
        raise CheckpointError(f"{path}: r={rank} is no whole number.")
    return PeftConfig(
        rank=int(rank),
        alpha=_number(raw, "lora_alpha", path, default=8),
        rank_pattern={k: int(v) for k, v in _pattern(raw, "rank_pattern", path).items()},
        alpha_pattern=_pattern(raw, "alpha_pattern", path),
        rslora=_flag(raw, "use_rslora", path),
        dropout=_number(raw, "lora_dropout", path, default=0.0, least=0.0),
        modules=_targets(raw, path),
        parameters=_words(raw, "target_parameters", path),
    )


def _check_supported(raw: Mapping[str, Any], path: pathlib.Path) -> None:
    if raw.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{path}: peft_type={shown(raw.get('peft_type'))} is not supported: only LORA is."
        )
    for key, value in raw.items():
        if key in _SILENT or value is None or value is False or value in ({}, []):
            continue
        if (key, value) == ("bias", "none"):
            continue
        if key == "init_lora_weights" and value in _HARMLESS_INITS:
            continue
        if key in _UNSUPPORTED:
            raise CheckpointError(
                f"{path}: {key}={shown(value)} is not supported: {_UNSUPPORTED[key]}."
            )
        raise CheckpointError(
            f"{path}: {shown(key)}={shown(value)} is not known here, and may change what the "
            "adapter computes. Delete the key if it does not."
        )


def _number(
    raw: Mapping[str, Any], key: str, path: pathlib.Path, *, default: Any, least: float = 1e-9
) -> float:
    value = raw.get(key, default)
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not least <= value <= 1e9:
        raise CheckpointError(f"{path}: {key}={shown(value)} must be a number above 0.")
    return value


def _flag(raw: Mapping[str, Any], key: str, path: pathlib.Path) -> bool:
    value = raw.get(key) or False
    if not isinstance(value, bool):
        raise CheckpointError(f"{path}: {key}={shown(value)} must be true or false.")
    return value


def _words(raw: Mapping[str, Any], key: str, path: pathlib.Path) -> tuple[str, ...]:
    value = raw.get(key) or []
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise CheckpointError(f"{path}: {key}={shown(value)} must be a list of names.")
    return tuple(value)


def _targets(raw: Mapping[str, Any], path: pathlib.Path) -> tuple[str, ...] | str:
    value = raw.get("target_modules")
    return value if isinstance(value, str) else _words(raw, "target_modules", path)


def _pattern(raw: Mapping[str, Any], key: str, path: pathlib.Path) -> dict[str, float]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: {key}={shown(value)} must map names to numbers.")
    for pattern in value:
        _check_pattern(pattern, key, path)
        _number(value, pattern, path, default=None)
    return value


def _check_pattern(pattern: str, key: str, path: pathlib.Path) -> None:
    """Regular expressions of strangers can take for ever; those that repeat little do not."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        pass
    else:
        few = len(pattern) <= _MAX_PATTERN and len(re.findall(r"[*+{]", pattern)) <= 3
        if few and not re.search(r"\)[*+{]", pattern):
            return
    raise CheckpointError(
        f"{path}: {key} has {shown(pattern)}: it must be a regular expression of at most "
        f"{_MAX_PATTERN} letters with at most 3 repetitions, none of them of a group."
    )


def write_config(
    folder: pathlib.Path,
    chosen: Mapping[str, tuple[int, float, bool]],
    others: Iterable[str],
    *,
    rslora: bool,
    dropout: float,
    base: str | None,
) -> None:
    """Writes an adapter_config.json whose targets are exactly the given ones.

    Args:
      folder: where.
      chosen: name of an adapted module or parameter -> (rank, scale, whether it is a parameter's).
      others: names of everything that must not be adapted, modules and parameters.
      rslora: how alpha is said.
      dropout: as trained with; PEFT refuses one over parameters, so 0 is written with those.
      base: name or path of the base model.
    """
    alphas = {n: plain_number(s * (r**0.5 if rslora else r)) for n, (r, s, _) in chosen.items()}
    ranks = {name: rank for name, (rank, _, _) in chosen.items()}
    rank, alpha = commonest(ranks.values()), commonest(alphas.values())
    targets = shortest_ends(chosen, others)
    parameters = sorted({targets[n] for n, (_, _, parameter) in chosen.items() if parameter})
    config = {
        "alpha_pattern": end_patterns(alphas, alpha),
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if parameters else dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": end_patterns(ranks, rank),
        "target_modules": sorted({targets[n] for n, (_, _, p) in chosen.items() if not p}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": rslora,
    }
    if parameters:
        config["target_parameters"] = parameters
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def plain_number(value: float) -> int | float:
    """A number of float32 origin as people write it: 16, not 15.999999."""
    near = round(value)
    return near if near and abs(value - near) <= 1e-6 * near else float(value)


def commonest(values: Iterable[Any]) -> Any:
    return collections.Counter(values).most_common(1)[0][0]


def end_patterns(values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """End of a name, as a regular expression -> value, where it is not the default."""
    out: dict[str, Any] = {}
    for value in sorted(set(values.values()) - {default}):
        own = [name for name, one in values.items() if one == value]
        rest = [name for name, one in values.items() if one != value]
        out |= {re.escape(end): value for end in shortest_ends(own, rest).values()}
    return out


def shortest_ends(chosen: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """For each chosen name the shortest end, in whole words, that no other name has."""
    taken = {end for name in others for end in _ends(name)}
    return {name: next((e for e in _ends(name) if e not in taken), name) for name in chosen}


def _ends(name: str) -> Iterable[str]:
    words = name.split(".")
    return (".".join(words[-n:]) for n in range(1, len(words) + 1))
