"""The frozen base of a LoRA run: where it comes from, how it is recognised, how both are read.

Checkpoints of such a run hold adapters and what trains them. The base is what `init_from` names
(or, without it, the weights that the seed gives), and a fingerprint in every checkpoint says
whether it is still the same.
"""

from __future__ import annotations

import hashlib
import math
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.checkpoint import layout, reader
from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.manager import Checkpoints
from moejax.checkpoint.quantised_weights import quantising
from moejax.checkpoint.weights import check_base_is_there, open_weights
from moejax.config import LoraConfig, RunConfig, build_section
from moejax.layers.adapter import is_adapter
from moejax.layers.param import drawing_options
from moejax.memory.host_state import on_host, take_layer
from moejax.models.parts import ModelParts

SAMPLES = 64  # values of each leaf that are looked at

Leaves = Mapping[str, jax.ShapeDtypeStruct]


def base_leaves(cfg: RunConfig, parts: ModelParts, wanted: Leaves) -> dict[str, jax.Array]:
    """Leaves of a run's base, by name, in the types and shardings of `wanted`.

    A base is plain; what is wanted as codes is quantised as it is read.

    Args:
      cfg: its `init_from` names the base; where it is empty, the weights that `seed` gives.
      parts: of the run's model.
      wanted: names as `params/...` and `balance/...`.
    Raises:
      CheckpointError: the base cannot be read, or lacks a leaf.
    """
    if not cfg.init_from:
        return _drawn(cfg.seed, parts, wanted)
    check_base_is_there(cfg.init_from)
    model = cfg.model
    weights = open_weights(
        cfg.init_from,
        packed=model.moe.expert_format == "mxfp4",
        vision=model.vision.num_layers > 0,
    )
    weights = quantising(weights, wanted)
    for name, leaf in wanted.items():
        if weights.shapes.get(name) != leaf.shape:
            there = weights.shapes.get(name, "nothing")
            raise CheckpointError(
                f"init_from={cfg.init_from} is not this run's base: it has {there} for "
                f"{shown(name)} {leaf.shape}. Name the model that the adapters were trained on."
            )
    return weights.read(wanted)


def _drawn(seed: int, parts: ModelParts, wanted: Leaves) -> dict[str, jax.Array]:
    def build(key: jax.Array) -> dict[str, jax.Array]:
        params, balance = parts.init(key)
        named = layout.named_leaves({"params": params, "balance": balance})
        return {name: named[name].astype(leaf.dtype) for name, leaf in wanted.items()}

    places = {name: leaf.sharding for name, leaf in wanted.items()}
    mesh = next(iter(places.values())).mesh
    with jax.set_mesh(mesh):
        draw = jax.jit(build, out_shardings=places, compiler_options=drawing_options(mesh))
        return draw(jax.random.key(seed))


def fingerprint(
    leaves: Mapping[str, jax.Array], like: Mapping[str, list] | None = None
) -> dict[str, list]:
    """Shape, dtype and a digest of sampled values of every leaf: `{name: [shape, dtype, sha256]}`.

    Args:
      leaves: by name.
      like: a fingerprint whose types the values are rounded to first, and said to be of.

    Reads `SAMPLES` values a leaf, at places that its name decides, so that a base of any size takes
    one small gather; the same on every mesh.
    """
    places = {name: _places(name, leaf.shape) for name, leaf in leaves.items()}
    dtypes = {name: str(leaf.dtype) for name, leaf in leaves.items()}
    dtypes |= {name: mark[1] for name, mark in (like or {}).items() if name in leaves}

    def sample(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: _at(leaf, places[name]).astype(dtypes[name]).astype(jnp.float32)
            for name, leaf in leaves.items()
        }

    values = jax.device_get(jax.jit(sample)(dict(leaves)))
    return {
        name: [
            list(leaf.shape), dtypes[name],
            hashlib.sha256(np.ascontiguousarray(values[name]).tobytes()).hexdigest()[:16],
        ]
        for name, leaf in leaves.items()
    }  # fmt: skip


def _at(leaf: jax.Array, places: tuple[np.ndarray, ...]) -> jax.Array:
    """Values at places of a leaf; of one in host memory, where nothing is gathered, by layers."""
    if not on_host(leaf):
        return leaf[places]
    lead, layers = leaf.shape[:2], np.ravel_multi_index(places[:2], leaf.shape[:2])

    def look(number: jax.Array, values: jax.Array) -> jax.Array:
        part = take_layer(leaf, (number // lead[1], number % lead[1]))
        return jnp.where(layers == number, part[places[2:]], values)

    return jax.lax.fori_loop(0, math.prod(lead), look, jnp.zeros(SAMPLES, leaf.dtype))


def _places(name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    draw = np.random.RandomState(zlib.crc32(name.encode()))
    return tuple(draw.randint(0, size, SAMPLES).astype(np.int32) for size in shape)


def check_base(where: Any, init_from: str, saved: Mapping[str, list], found: Mapping[str, list]):
    """Raises CheckpointError naming the first leaf in which a base is not the one trained on."""
    for name, mark in saved.items():
        other = found.get(name)
        if other == list(mark):
            continue
        base = f"init_from={init_from}" if init_from else "the base that this seed gives"
        if other is None or other[:2] != list(mark)[:2]:
            kind = f"{mark[1]}{tuple(mark[0])} there"
            kind += f" and {other[1]}{tuple(other[0])} here" if other else " and is missing here"
        else:
            kind = "has other values"
        raise CheckpointError(
            f"checkpoint {where} was trained over another base: {shown(name)} {kind}. "
            f"Name the model that it was started with: {base} is not."
        )


def check_scale(where: Any, saved: Mapping[str, Any], lora: LoraConfig) -> None:
    """Raises CheckpointError where a config gives adapters another scale than they learned with.

    Or another form of the base below them.

    Args:
      where: the step, for the message.
      saved: the `lora` section that it was saved with.
      lora: the one that it is to be read with.
    """
    learned = build_section(LoraConfig, saved)
    for field in ("alpha", "rslora", "alpha_pattern", "rank_pattern"):
        old, new = getattr(learned, field), getattr(lora, field)
        if old != new:
            raise CheckpointError(
                f"checkpoint {where} has adapters that learned with lora.{field}={old!r}, not "
                f"{new!r}: another scale is another model. Leave it, or start another --workdir."
            )
    if learned.base_format != lora.base_format:
        raise CheckpointError(
            f"checkpoint {where} has adapters that learned over lora.base_format="
            f"{learned.base_format!r}, not {lora.base_format!r}: rounded otherwise it is another "
            "base. Leave it, or start another --workdir."
        )


def read_model(
    cfg: RunConfig, step_dir: pathlib.Path, parts: ModelParts, abstract: Mapping[str, Any]
) -> dict[str, Any]:
    """`{"params": ..., "balance": ...}` of a step, with the base under a LoRA run's adapters.

    Args:
      cfg: the run's config.
      step_dir: folder of the step.
      parts: of the run's model, adapters included.
      abstract: the two trees as jax.ShapeDtypeStruct with shardings.
    Raises:
      CheckpointError: as `Checkpoints.restore_parts`, or another base.
    """
    wanted = {key: abstract[key] for key in ("params", "balance")}
    if not cfg.lora.rank:
        return Checkpoints.restore_parts(step_dir, wanted)
    meta = reader.read_meta(step_dir)
    check_scale(step_dir, meta["config"]["lora"], cfg.lora)
    params = layout.named_leaves({"params": abstract["params"]})
    own = {name: leaf for name, leaf in params.items() if name in meta["leaves"]}
    base = {name: leaf for name, leaf in params.items() if name not in own}
    missing = next((name for name in base if is_adapter(shown(name, whole=True))), None)
    if missing:
        raise CheckpointError(f"checkpoint {step_dir} has no adapter {shown(missing)}.")
    nested = layout.nest({name.partition("/")[2]: leaf for name, leaf in own.items()})
    read = Checkpoints.restore_parts(step_dir, {**wanted, "params": nested})
    arrays = base_leaves(cfg, parts, base)
    position = layout.from_json(meta["position"])
    marks = {n: m for n, m in position.get("base", {}).items() if not _narrower(arrays.get(n), m)}
    check_base(step_dir, cfg.init_from, marks, fingerprint(arrays, marks))
    arrays |= layout.named_leaves({"params": read["params"]})
    ordered = [arrays[name] for name in params]
    tree = jax.tree.unflatten(jax.tree.structure(abstract["params"]), ordered)
    return {"params": tree, "balance": read["balance"]}


def _narrower(leaf: jax.Array | None, mark: list) -> bool:
    """Whether a leaf was read in a type that cannot hold what was trained on."""
    return leaf is not None and leaf.dtype.itemsize < np.dtype(mark[1]).itemsize


def shown(name: str, *, whole: bool = False) -> str:
    """`params/stack0/run0/attn/q` as users know it: `stack0.run0.attn.q`."""
    return (name if whole else name.partition("/")[2]).replace("/", ".")
