"""A decoder's memory while it generates: what every layer remembers, stacked as the layers are."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import ModelConfig
from moejax.layers.cache import IndexedCache, KdaCache, LayerCache, Now, kda_cache, latent_cache
from moejax.models.grouping import LayerKind, Segment
from moejax.partitioning import constrain


class DecodeCache(NamedTuple):
    """What a batch of rows has been told so far.

    All rows end at one position; a shorter prompt has padding in front.

    Attributes:
      layers: per segment and run the layers' caches, [repeats, count, B, ...].
      padding_B: int32, positions in front of each row that hold no token.
      length: int32 scalar, positions filled.
    """

    layers: tuple[tuple[LayerCache, ...], ...]
    padding_B: jax.Array
    length: jax.Array

    def now(self, *, fresh: bool) -> Now:
        """Where the next tokens stand."""
        return Now(self.padding_B, self.length, fresh)

    @property
    def capacity(self) -> int | None:
        """Positions there is room for; None without a layer that keeps a row a position."""
        kept = [c for run in self.layers for c in run if not isinstance(c, KdaCache)]
        sizes = [c.latent.shape[3] for c in kept]
        return sizes[0] if sizes else None


def empty_cache(
    cfg: ModelConfig, segments: tuple[Segment, ...], batch: int, capacity: int, dtype: Any
) -> DecodeCache:
    """A cache of nothing, for `batch` rows of at most `capacity` positions."""

    def stacked(kind: LayerKind, lead: tuple[int, int]) -> LayerCache:
        one = _of_kind(cfg, kind, batch, capacity, dtype)
        return jax.tree.map(lambda a: jnp.zeros((*lead, *a.shape), a.dtype), one)

    layers = tuple(
        tuple(stacked(run.kind, (segment.repeats, run.count)) for run in segment.runs)
        for segment in segments
    )
    nothing = DecodeCache(layers, jnp.zeros(batch, jnp.int32), jnp.zeros((), jnp.int32))
    return spread(nothing)


def spread(cache: DecodeCache) -> DecodeCache:
    """The cache with its rows over the devices that share the batch."""
    layers = jax.tree.map(
        lambda a: constrain(a, (None, None, "batch") + (None,) * (a.ndim - 3)), cache.layers
    )
    return cache._replace(layers=layers, padding_B=constrain(cache.padding_B, ("batch",)))


def _of_kind(
    cfg: ModelConfig, kind: LayerKind, batch: int, capacity: int, dtype: Any
) -> LayerCache:
    if kind.attention == "kda":
        return kda_cache(cfg.kda, batch, dtype)
    rows = latent_cache(cfg.mla, batch, capacity, dtype)
    if kind.attention == "mla":
        return rows
    return IndexedCache(*rows, jnp.zeros((batch, capacity, cfg.dsa.head_dim), dtype))
