"""One decoder layer: attention and feed-forward, each reading a mix over depth.

Architecture sections 1.2 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.config import ModelConfig
from moejax.layers.adapter import AdapterSpec, Drop, attach
from moejax.layers.attn_res import AttnRes
from moejax.layers.cache import LayerCache, Now
from moejax.layers.dsa import Dsa
from moejax.layers.ffn import Glu
from moejax.layers.kda import Kda
from moejax.layers.mla import Mla
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.layers.moe.placement import Spread
from moejax.layers.norm import RmsNorm
from moejax.layers.quantised import quantise
from moejax.models.grouping import LayerKind


class Residual(NamedTuple):
    """The residual state between sublayers.

    Attributes:
      sources_XBTD: finished blocks first, then, at place `last`, the running sum; later places are
        zero and unused. Without AttnRes there is one source, the ordinary residual stream.
      last: int32 place of the running sum.
    """

    sources_XBTD: jax.Array
    last: jax.Array

    def running_sum(self) -> jax.Array:
        """The source that sublayer outputs are added to, [B, T, D]."""
        return lax.dynamic_index_in_dim(self.sources_XBTD, self.last, 0, keepdims=False)

    def add(self, y_BTD: jax.Array) -> Residual:
        """The state after a sublayer's output joined the running sum."""
        total = self.running_sum() + y_BTD
        return self._replace(
            sources_XBTD=lax.dynamic_update_index_in_dim(self.sources_XBTD, total, self.last, 0)
        )

    def close_block(self, is_border: jax.Array) -> Residual:
        """Where `is_border`, the running sum becomes a finished block.

        The next (zero) place takes over.
        """
        return self._replace(last=self.last + is_border.astype(jnp.int32))

    def kept(self) -> tuple[jax.Array, jax.Array]:
        """What :meth:`rebuilt` needs to give this state back: running sum and its place."""
        return self.running_sum(), self.last

    def rebuilt(self, kept: tuple[jax.Array, jax.Array]) -> Residual:
        """An earlier state, from this later one and what was kept of it.

        Finished blocks never change: they are still where they were.
        """
        running_BTD, last = kept
        place_X = jnp.arange(self.sources_XBTD.shape[0])[:, None, None, None]
        finished = jnp.where(place_X < last, self.sources_XBTD, 0)
        return Residual(jnp.where(place_X == last, running_BTD, finished), last)


def start_residual(embedding_BTD: jax.Array, num_places: int) -> Residual:
    """The state before layer 0: the embedding as the only source."""
    zeros = jnp.zeros((num_places - 1, *embedding_BTD.shape), embedding_BTD.dtype)
    return Residual(jnp.concatenate([embedding_BTD[None], zeros]), jnp.zeros((), jnp.int32))


def num_sources(num_layers: int, block: int) -> int:
    """Places the residual needs: embedding and every block with AttnRes, one without."""
    return 1 + -(-num_layers // block) if block else 1


class DecoderLayer(nnx.Module):
    """Mix, norm, attention, add; mix, norm, feed-forward, add."""

    def __init__(
        self, cfg: ModelConfig, kind: LayerKind, rngs: nnx.Rngs, *,
        track_max_logit: bool = False, watch: bool = False, spread: Spread | None = None,
        adapters: tuple[AdapterSpec, ...] = (), adapter_dropout: float = 0.0,
        base_format: str = "plain",
    ):  # fmt: skip
        self.adapter_dropout = adapter_dropout
        self.cfg, self.kind, self.watch = cfg, kind, watch
        std, eps = cfg.init_std, cfg.norm_eps
        self.attn_norm, self.ffn_norm = RmsNorm(cfg.dim, eps), RmsNorm(cfg.dim, eps)
        if cfg.attn_res_block:
            self.attn_mix, self.ffn_mix = AttnRes(cfg.dim, eps), AttnRes(cfg.dim, eps)
        self.attn: Kda | Mla
        if kind.attention == "kda":
            self.attn = Kda(cfg.dim, cfg.kda, eps, std, rngs)
        elif kind.attention == "mla":
            self.attn = Mla(cfg.dim, cfg.mla, std, rngs, track_max_logit=track_max_logit)
        else:
            self.attn = Dsa(cfg.dim, cfg.mla, cfg.dsa, std, rngs, track_max_logit=track_max_logit)
        self.ffn: Glu | LatentMoe
        if kind.ffn == "dense":
            self.ffn = Glu(cfg.dim, cfg.ffn.dim, cfg.ffn, std, rngs)
        else:
            self.ffn = LatentMoe(cfg.dim, cfg.moe, cfg.ffn, eps, std, rngs, spread=spread)
        quantise(self, cfg.dim, base_format)
        attach(self, adapters, rngs)

    def __call__(
        self,
        residual: Residual,
        segment_ids_BT: jax.Array,
        index: jax.Array,
        dropout_key: jax.Array | None,
        pinned_XBTA: jax.Array | None = None,
    ) -> tuple[Residual, dict]:
        """One layer.

        Args:
          residual: state before the layer.
          segment_ids_BT: int32, 0 = padding.
          index: int32 number of the layer in the whole model, which may be traced.
          dropout_key: key of the step, or None without dropout.
          pinned_XBTA: experts of every layer's tokens, instead of the router's choice.
        Returns:
          The state after it, and auxiliary values (losses, loads, counts) of its parts.
        """

        def attend(x_BTD):
            out_BTD, aux = self.attn(x_BTD, segment_ids_BT, self._drop_of(dropout_key, index))
            return out_BTD, {**aux, "bad_attention": _not_finite(out_BTD)} if self.watch else aux

        residual, aux, moe_aux = self._sublayers(
            residual, segment_ids_BT, index, attend, dropout_key, pinned_XBTA
        )
        if self.watch:
            aux = {**aux, "bad_output": _not_finite(residual.running_sum())}
        return residual, {**aux, **moe_aux}

    def cached(
        self, residual: Residual, cache: Any, now: Now, index: jax.Array
    ) -> tuple[Residual, LayerCache]:
        """The layer on the tokens at hand; what it remembers of the ones before is in `cache`.

        Returns:
          The state after it, and what it now remembers (see `write_layer`).
        """
        length = residual.sources_XBTD.shape[2]
        places_T = now.position + jnp.arange(length, dtype=jnp.int32)
        segment_ids_BT = (places_T >= now.padding_B[:, None]).astype(jnp.int32)

        def attend(x_BTD):
            return self.attn.cached(x_BTD, cache, now)

        residual, news, _ = self._sublayers(residual, segment_ids_BT, index, attend, None)
        return residual, news

    def _sublayers(
        self,
        residual: Residual,
        segment_ids_BT: jax.Array,
        index: jax.Array,
        attend: Callable[[jax.Array], tuple[jax.Array, Any]],
        dropout_key: jax.Array | None,
        pinned_XBTA: jax.Array | None = None,
    ) -> tuple[Residual, Any, dict]:
        """Both sublayers; with what `attend` gives beside its output, and the experts' measures."""
        mixed = self._read(residual, "attn_mix")
        if self.cfg.attn_res_block:  # mix first, then close the block
            residual = residual.close_block(index % self.cfg.attn_res_block == 0)
        out, beside = attend(self.attn_norm(mixed))
        residual = residual.add(self._drop(out, dropout_key, 2 * index))
        x_BTD = self.ffn_norm(self._read(residual, "ffn_mix"))
        moe_aux: dict = {}
        drop = self._drop_of(dropout_key, index)
        if isinstance(self.ffn, Glu):
            out = self.ffn(x_BTD, drop)
        else:
            pinned_BTA = None if pinned_XBTA is None else pinned_XBTA[index]
            out, moe_aux = self.ffn(x_BTD, segment_ids_BT, pinned_BTA, drop)
        return residual.add(self._drop(out, dropout_key, 2 * index + 1)), beside, moe_aux

    def _read(self, residual: Residual, name: str) -> jax.Array:
        if not self.cfg.attn_res_block:
            return residual.running_sum()
        return getattr(self, name)(residual.sources_XBTD, residual.last + 1)

    def _drop_of(self, key: jax.Array | None, index: jax.Array) -> Drop | None:
        """Dropout of what this layer's adapters read."""
        if key is None or not self.adapter_dropout:
            return None
        return Drop(jax.random.fold_in(key, index), self.adapter_dropout)

    def _drop(self, x_BTD: jax.Array, key: jax.Array | None, salt: jax.Array) -> jax.Array:
        if key is None or not self.cfg.dropout:
            return x_BTD
        keep = 1.0 - self.cfg.dropout
        mask = jax.random.bernoulli(jax.random.fold_in(key, salt), keep, x_BTD.shape)
        return jnp.where(mask, x_BTD / keep, 0).astype(x_BTD.dtype)


def _not_finite(x: jax.Array) -> jax.Array:
    """1.0 where an element is infinite or no number, so that microbatches can be summed."""
    return (~jnp.all(jnp.isfinite(x))).astype(jnp.float32)
