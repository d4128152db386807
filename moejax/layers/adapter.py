"""Low-rank adapters beside frozen maps: ``y = x W + scale (x A) B``.

A layer sends its inputs through its maps by :func:`project`, which adds the adapter where there is
one. Which maps have one is decided above (`moejax.lora.select`); here they are made and applied.

Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.layers.param import PARAM_DTYPE, use


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """One adapter of the layers of a run.

    Attributes:
      owner: path from the layer to the module that holds the map, e.g. ("ffn", "router").
      name: last word of the map's published name, e.g. `q_proj`.
      leaves: the parameters it changes; of several, the last dims stand one behind the other.
      at: its place in the parameter's second dim, where gate and up share one.
      rank: r, the largest of the run's layers.
      scale: alpha / r, or what else the product is multiplied by.
      ranks: rank in each layer of the run, [repeats][count]; 0 where a layer has none.
      init: "default" (uniform up to in^-0.5, as PEFT) or "gaussian" (deviation 1/r), of A.
      shared_a: routed experts have one A together and a B each.
    """

    owner: tuple[str, ...]
    name: str
    leaves: tuple[str, ...]
    at: int | None
    rank: int
    scale: float
    ranks: tuple[tuple[int, ...], ...]
    init: str = "default"
    shared_a: bool = False


class Adapter(nnx.Module):
    """A [in, r] and B [r, ...]; of routed experts [E, in, r] (or one [in, r]) and [E, r, ...].

    B starts at 0, so a fresh adapter changes nothing.
    """

    def __init__(self, spec: AdapterSpec, maps: list[nnx.Param], rngs: nnx.Rngs):
        self.leaves, self.at, self.scale = spec.leaves, spec.at, spec.scale
        axes = tuple(maps[0].get_metadata()["axes"])
        experts = axes[:1] == ("experts",)
        lead, lead_axes = (maps[0].shape[:1], axes[:1]) if experts else ((), ())
        width, *out = maps[0].shape[len(lead) :]
        width *= 2 if maps[0].dtype == jnp.uint8 else 1  # packed: two values a byte
        in_axis, *out_axes = axes[len(lead) :]
        if spec.at is not None:
            out, out_axes = out[1:], out_axes[1:]
        out[-1] = sum(one.shape[-1] for one in maps)
        if spec.shared_a:
            a_shape: tuple[int, ...] = (width, spec.rank)
            a_axes: tuple[str | None, ...] = ("latent", None)
        else:
            a_shape, a_axes = (*lead, width, spec.rank), (*lead_axes, in_axis, None)
        self.a = _small(_initial(spec, rngs.params(), a_shape, width), a_axes)
        b_axes = (*lead_axes, None, *out_axes)
        self.b = _small(jnp.zeros((*lead, spec.rank, *out), PARAM_DTYPE), b_axes)

    def __call__(self, x: jax.Array, drop: Drop | None, precision: Any = None) -> jax.Array:
        """The change of the map's output for inputs [..., in]: [..., *out]."""
        low = jnp.tensordot(_dropped(x, drop), use(self.a, x.dtype), 1, precision=precision)
        return jnp.tensordot(self.scale * low, use(self.b, x.dtype), 1, precision=precision)

    def delta(self, dtype: Any) -> jax.Array:
        """The change of the map itself, [in, *out], for layers that read the map."""
        return self.scale * jnp.tensordot(use(self.a, dtype), use(self.b, dtype), 1)


class Adapters(nnx.Module):
    """The adapters of one module, an attribute each."""

    def on(self, leaf: str) -> Iterator[tuple[str, Adapter]]:
        """Names and adapters of those that change this parameter."""
        for name, adapter in vars(self).items():
            if isinstance(adapter, Adapter) and leaf in adapter.leaves:
                yield name, adapter


class Drop:
    """Dropout of what adapters read: a key of this layer and step, and how much.

    Every adapter draws its own mask, from its name.
    """

    def __init__(self, key: jax.Array, rate: float):
        self.key, self.rate = key, rate

    def of(self, name: str) -> Drop:
        """The dropout of one adapter."""
        return Drop(jax.random.fold_in(self.key, zlib.crc32(name.encode()) & 0x7FFFFFFF), self.rate)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this dotted name belongs to an adapter."""
    return ".lora." in name


def attach(layer: nnx.Module, specs: tuple[AdapterSpec, ...], rngs: nnx.Rngs) -> None:
    """Puts fresh adapters beside the maps of a layer, as `lora.<name>` of the modules."""
    for spec in specs:
        owner = _owner(layer, spec)
        if not hasattr(owner, "lora"):
            owner.lora = Adapters()
        maps = [getattr(owner, leaf) for leaf in spec.leaves]
        setattr(owner.lora, spec.name, Adapter(spec, maps, rngs))


def _owner(layer: nnx.Module, spec: AdapterSpec) -> Any:
    """The module that holds the map."""
    return functools.reduce(getattr, spec.owner, layer)


def within_ranks(layer: nnx.Module, specs: tuple[AdapterSpec, ...]) -> None:
    """Clears, in a module that stacks layers, what is beyond each layer's own rank.

    A's columns there are 0 and so are B's rows: the gradient of either is a product with the
    other, and they stay 0.
    """
    for spec in specs:
        ranks = jnp.asarray(spec.ranks, jnp.int32)
        if min(map(min, spec.ranks)) == spec.rank:
            continue
        a = getattr(_owner(layer, spec).lora, spec.name).a
        ranks = ranks.reshape(*ranks.shape, *(1,) * (len(a.shape) - 2))
        a[...] = jnp.where(jnp.arange(spec.rank) < ranks, a[...], 0)


def project(
    module: nnx.Module, leaf: str, x: jax.Array, *,
    drop: Drop | None = None, precision: Any = None,
) -> jax.Array:  # fmt: skip
    """``x W`` of one of the module's maps, with its adapters.

    Args:
      module: holds the map, [in, *out], as parameter `leaf`.
      x: [..., in]; the product is in its dtype.
      drop: dropout of the adapters' inputs; None: none.
      precision: of the products.
    Returns:
      [..., *out].
    """
    y = jnp.tensordot(x, use(getattr(module, leaf), x.dtype), 1, precision=precision)
    for name, adapter in adapters_on(module, leaf):
        change = adapter(x, drop and drop.of(name), precision)
        y = y + change if adapter.at is None else y.at[..., adapter.at, :].add(change)
    return y


def adapters_on(module: nnx.Module, leaf: str) -> list[tuple[str, Adapter]]:
    """Names and adapters of a module's parameter, none where it has none."""
    adapters = getattr(module, "lora", None)
    return [] if adapters is None else list(adapters.on(leaf))


def _small(value: jax.Array, axes: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(value, axes=axes, matrix=None, head_axis=None)


def _initial(spec: AdapterSpec, key: jax.Array, shape: tuple[int, ...], width: int) -> jax.Array:
    if spec.init == "gaussian":
        return jax.random.normal(key, shape, PARAM_DTYPE) / spec.rank
    bound = width**-0.5
    return jax.random.uniform(key, shape, PARAM_DTYPE, -bound, bound)


def _dropped(x: jax.Array, drop: Drop | None) -> jax.Array:
    if drop is None or not drop.rate:
        return x
    keep = 1.0 - drop.rate
    return jnp.where(jax.random.bernoulli(drop.key, keep, x.shape), x / keep, 0).astype(x.dtype)
