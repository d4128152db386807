"""What a layer remembers of the tokens before: its share of a decoding cache.

Every array leads with the batch. Stacked layers put [repeats, count] in front, as parameters do.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from moejax.config import KdaConfig, MlaConfig
from moejax.layers.param import wide


class KdaCache(NamedTuple):
    """A delta rule's memory, of one size whatever came before.

    Attributes:
      state: float32 [B, N, H, h].
      q_history, k_history, v_history: the last K-1 inputs of the convolutions, [B, K-1, N H].
    """

    state: jax.Array
    q_history: jax.Array
    k_history: jax.Array
    v_history: jax.Array


class LatentCache(NamedTuple):
    """Latent attention's memory: one row a position, for all heads.

    Attributes:
      latent: normed key-value latents [B, S, C].
      k_rope: shared key dims, rotated where the config rotates, [B, S, R].
    """

    latent: jax.Array
    k_rope: jax.Array


class IndexedCache(NamedTuple):
    """Latent attention's memory, and the index keys [B, S, u] that its rows are selected by."""

    latent: jax.Array
    k_rope: jax.Array
    k_index: jax.Array


LayerCache = KdaCache | LatentCache | IndexedCache
_Cache = TypeVar("_Cache", KdaCache, LatentCache, IndexedCache)


class Now(NamedTuple):
    """Where decoding stands.

    Attributes:
      padding_B: int32, how many positions in front of each row hold no token.
      position: int32 scalar, place of the tokens at hand in every row.
      fresh: whether nothing came before: the tokens at hand are the whole row so far.
    """

    padding_B: jax.Array
    position: jax.Array
    fresh: bool

    def segment_ids(self, length: int) -> jax.Array:
        """[B, length]: 1 where a token may stand, 0 in the padding."""
        places = jnp.arange(length, dtype=jnp.int32)
        return (places >= self.padding_B[:, None]).astype(jnp.int32)


def kda_cache(cfg: KdaConfig, batch: int, dtype: Any) -> KdaCache:
    """A KDA layer's memory of nothing."""
    N, H, h = cfg.num_heads, cfg.head_dim, cfg.value_head_dim
    history = [jnp.zeros((batch, cfg.conv_size - 1, N * width), dtype) for width in (H, H, h)]
    return KdaCache(jnp.zeros((batch, N, H, h), wide(dtype)), *history)


def latent_cache(cfg: MlaConfig, batch: int, capacity: int, dtype: Any) -> LatentCache:
    """An MLA layer's memory of nothing, with room for `capacity` positions."""
    rows = [jnp.zeros((batch, capacity, width), dtype) for width in (cfg.kv_latent, cfg.rope_dim)]
    return LatentCache(*rows)


def read_layer(stacked: _Cache, repeat: jax.Array, count: jax.Array) -> _Cache:
    """One layer's memory out of those of its run."""
    pick = jax.lax.dynamic_index_in_dim
    return jax.tree.map(
        lambda a: pick(pick(a, repeat, keepdims=False), count, keepdims=False), stacked
    )


def write_layer(
    stacked: _Cache, new: _Cache, repeat: jax.Array, count: jax.Array, position: jax.Array
) -> _Cache:
    """The run's memories with one layer's news in its place.

    Of a KDA layer that is all it remembers; of the others the rows of the tokens at hand, so that
    a donated cache is written in place and never copied.
    """
    start = 0 if isinstance(new, KdaCache) else position

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        place = [jnp.int32(i) for i in (repeat, count, 0, start, *(0,) * (whole.ndim - 4))]
        return jax.lax.dynamic_update_slice(whole, part[None, None].astype(whole.dtype), place)

    return jax.tree.map(put, stacked, new)
