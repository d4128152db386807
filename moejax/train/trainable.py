"""Which parameters a run trains, and trees of parameters split by it."""

from __future__ import annotations

import fnmatch
from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import ConfigError, TrainConfig
from moejax.layers.adapter import is_adapter
from moejax.layers.param import is_kept_float32
from moejax.layers.quantised import is_coded
from moejax.partitioning import ParamInfo


def trainable_mask(cfg: TrainConfig, infos: dict) -> dict:
    """True for every parameter that `train.trainable` names; all of them where it is empty.

    Of a model with adapters: the adapters, and what it names besides.

    Args:
      cfg: its `trainable` are patterns of dotted names, `*` for anything.
      infos: ParamInfo of every parameter.
    Returns:
      bools in the structure of `infos`.
    Raises:
      ConfigError: a pattern that matches no parameter.
    """
    names = [info.name for info in jax.tree.leaves(infos)]
    for pattern in cfg.trainable:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(
                f"train.trainable: {pattern!r} matches no parameter; names are like {names[0]!r} "
                "(`moejax config --sharding` lists them)."
            )
    everything = not cfg.trainable and not any(map(is_adapter, names))

    def trains(info: ParamInfo) -> bool:
        named = any(fnmatch.fnmatchcase(info.name, p) for p in cfg.trainable)
        return everything or named or is_adapter(info.name)

    return jax.tree.map(trains, infos)


def split(tree: dict, mask: dict) -> tuple[dict, dict]:
    """The tree's trained part and its frozen part: nested dicts without the other's leaves."""
    parts: tuple[dict, dict] = ({}, {})
    for key, value in tree.items():
        if isinstance(mask[key], dict):
            halves = split(value, mask[key])
        else:
            halves = (value, {}) if mask[key] else ({}, value)
        for part, half in zip(parts, halves, strict=True):
            if not (isinstance(half, dict) and not half):
                part[key] = half
    return parts


def merge(trained: dict, frozen: dict) -> dict:
    """The tree that :func:`split` cut in two."""
    out = dict(frozen)
    for key, value in trained.items():
        out[key] = merge(value, out[key]) if key in out else value
    return out


def stored_params(cfg: TrainConfig, params: dict, infos: dict, mask: dict) -> dict:
    """ShapeDtypeStructs of the parameters as they are kept: frozen ones in `train.frozen_dtype`.

    Leaves that must not be rounded stay float32 all the same, and codes what they are.

    Raises:
      ConfigError: a leaf of codes would be trained.
    """

    def stored(leaf: Any, info: Any, trained: bool) -> jax.ShapeDtypeStruct:
        if leaf.dtype == jnp.uint8 and trained:
            raise ConfigError(
                f"model.moe.expert_format='mxfp4' keeps {info.name} packed, which cannot be "
                "trained. Train adapters (lora.rank), or use expert_format='plain'."
            )
        if trained and is_coded(info.name, leaf.dtype):
            raise ConfigError(
                f"lora.base_format keeps {info.name} in 8 bits, which cannot be trained. Leave it "
                "out of train.trainable, or use lora.base_format='plain'."
            )
        if is_coded(info.name, leaf.dtype):
            return leaf
        rounded = not trained and not is_kept_float32(info.name)
        dtype = jnp.dtype(cfg.frozen_dtype) if rounded else leaf.dtype
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(stored, params, infos, mask)
