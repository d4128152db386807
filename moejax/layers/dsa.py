"""DSA: gated MLA over the keys that a lightning indexer selects, and the indexer's own loss.

Architecture section 4.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import ConfigError, DsaConfig, MlaConfig
from moejax.layers.adapter import Drop, project
from moejax.layers.cache import IndexedCache, Now
from moejax.layers.dsa_recall import chosen_mass
from moejax.layers.mla import Latents, Mla, expanded
from moejax.layers.norm import layer_norm
from moejax.layers.param import use, vector, weight, wide
from moejax.layers.rope import At, rotate
from moejax.memory import names
from moejax.memory.names import tag
from moejax.partitioning import batch_local
from pallas_kernels.blocks import take_rows
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.sparse_flash_attention import (
    crossover,
    sparse_flash_attention,
    sparse_max_logit,
)


class Indexer(nnx.Module):
    """Lightning indexer: few small query heads, one key head, a weight a head.

    Its rotated dims come first.
    """

    def __init__(self, dim: int, cfg: DsaConfig, mla: MlaConfig, std: float, rngs: nnx.Rngs):
        self.cfg, self.mla = cfg, mla
        self.q = weight(
            rngs, (mla.q_latent, cfg.num_heads * cfg.head_dim), ("latent", None), std=std
        )
        self.k = weight(rngs, (dim, cfg.head_dim), ("embed", None), std=std)
        self.weights = weight(rngs, (dim, cfg.num_heads), ("embed", None), std=std)
        self.k_norm = vector(jnp.ones(cfg.head_dim), (None,))
        self.k_norm_bias = vector(jnp.zeros(cfg.head_dim), (None,))

    def __call__(
        self,
        x_BTD: jax.Array,
        q_latent_BTQ: jax.Array,
        at: At | None = None,
        *,
        drop: Drop | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Index queries [B,T,U,u], keys [B,T,u], raw float32 head weights [B,T,U]."""
        heads = (*x_BTD.shape[:2], self.cfg.num_heads, self.cfg.head_dim)
        q_BTUu = tag(project(self, "q", q_latent_BTQ, drop=drop), names.INDEX).reshape(heads)
        k_BTu = self._normed_keys(x_BTD, drop)
        w_BTU = project(self, "weights", x_BTD.astype(wide(x_BTD.dtype)), drop=drop)
        w_BTU = tag(w_BTU, names.INDEX)
        return self._turn(q_BTUu, at), self._turn(k_BTu[:, :, None], at)[:, :, 0], w_BTU

    def keys(self, x_BTD: jax.Array, at: At | None = None) -> jax.Array:
        """The index keys alone, [B, T, u]."""
        return self._turn(self._normed_keys(x_BTD)[:, :, None], at)[:, :, 0]

    def _normed_keys(self, x_BTD: jax.Array, drop: Drop | None = None) -> jax.Array:
        full = wide(x_BTD.dtype)
        k_BTu = tag(project(self, "k", x_BTD, drop=drop), names.INDEX)
        weight, bias = use(self.k_norm, full), use(self.k_norm_bias, full)
        return layer_norm(k_BTu, weight, bias, self.cfg.k_norm_eps)

    def _turn(self, x_BTUu: jax.Array, at: At | None) -> jax.Array:
        if self.cfg.rope == "none":
            return x_BTUu
        R = self.mla.rope_dim
        return jnp.concatenate(
            [rotate(x_BTUu[..., :R], self.mla, self.cfg.rope, at), x_BTUu[..., R:]], -1
        )


class Dsa(Mla):
    """MLA with an indexer.

    Stage `warmup`: dense attention, only the indexer learns; `sparse`: top-k attention and the
    indexer learns from its KL; `frozen`: top-k attention, the indexer is left as it is.

    Attributes:
      track_recall: also measure how much of the attention the chosen keys have (`recall`, the sums
        of `chosen_mass`); takes [T, T] a head, for benchmarks.
    """

    def __init__(
        self, dim: int, cfg: MlaConfig, dsa: DsaConfig, std: float, rngs: nnx.Rngs, **options
    ):
        super().__init__(dim, cfg, std, rngs, **options)
        if not cfg.q_latent:
            raise ConfigError(
                "DSA layers need model.mla.q_latent > 0: the indexer reads the query latent."
            )
        if dsa.rope != "none" and dsa.head_dim < cfg.rope_dim:
            raise ConfigError(
                f"model.dsa.head_dim={dsa.head_dim} is less than the "
                f"model.mla.rope_dim={cfg.rope_dim} dims it rotates. "
                "Make it larger, or set model.dsa.rope='none'."
            )
        self.dsa, self.track_recall = dsa, False
        self.indexer = Indexer(dim, dsa, cfg, std, rngs)

    def attend(
        self, x_BTD: jax.Array, parts: Latents, segment_ids_BT: jax.Array,
        drop: Drop | None = None,
    ) -> tuple[jax.Array, dict]:  # fmt: skip
        assert parts.q_latent_BTQ is not None  # checked when the layer was built
        # The language loss must not train the indexer, nor its KL anything else: cut at its inputs.
        index = self.indexer(
            jax.lax.stop_gradient(x_BTD), jax.lax.stop_gradient(parts.q_latent_BTQ), drop=drop
        )
        body = self._warmup if self.dsa.stage == "warmup" else self._sparse
        run = batch_local(body, (0,) * 8)
        args = (*index, *parts[:4], segment_ids_BT, *self.kv_maps(x_BTD.dtype))
        out_BTNh, kl_B, top = run(*args)
        aux = {"indexer_kl": jnp.sum(kl_B), **self._max_aux(top)}
        if self.track_recall:
            mass = batch_local(self._mass, (0,) * 8)(*args)
            aux["recall"] = jnp.stack([jnp.sum(mass_B) for mass_B in mass])
        return out_BTNh, aux

    def cached(self, x_BTD: jax.Array, cache: Any, now: Now) -> tuple[jax.Array, IndexedCache]:
        """As in MLA, with the tokens' index keys among their rows."""
        at = None if now.fresh else At(now.position, cache.latent.shape[1])
        out_BTD, rows = super().cached(x_BTD, cache, now)
        return out_BTD, IndexedCache(rows.latent, rows.k_rope, self.indexer.keys(x_BTD, at))

    def attend_cached(self, x_B1D: jax.Array, parts: Latents, cache: Any, now: Now) -> jax.Array:
        """Attention of one token over the rows that its indexer selects: float32 [B, 1, N, h]."""
        if self.dsa.stage == "warmup":
            return super().attend_cached(x_B1D, parts, cache, now)
        assert parts.q_latent_BTQ is not None
        at = At(now.position, cache.latent.shape[1])
        index = self.indexer(x_B1D, parts.q_latent_BTQ, at)
        run = batch_local(self._selected, (0,) * 11)
        rows = (*cache, now.padding_B, now.position)
        return run(*index, *parts[:4], *rows, *self.kv_maps(x_B1D.dtype))

    def _selected(
        self, q_idx, k_idx, w_idx, q, q_rope, latent, k_rope, past, rope_past, idx_past,
        padding_B, position, k_b, v_b,
    ):  # fmt: skip
        S = past.shape[1]
        now = Now(padding_B, position, False)
        keys_BSu = jax.lax.dynamic_update_slice_in_dim(idx_past, k_idx, position, 1)
        indices_B1J = lightning_indexer(
            q_idx, keys_BSu, w_idx, top_k=min(self.dsa.top_k, S), q_offset=position,
            segment_ids=(position >= padding_B).astype(jnp.int32)[:, None],
            kv_segment_ids=now.segment_ids(S),
        )  # fmt: skip
        # Only the selected rows are read; the token's own is not in the cache yet.
        is_own_BJ1 = (indices_B1J == position)[:, 0, :, None]
        latent_BJC, k_rope_BJR = (
            jnp.where(is_own_BJ1, new, take_rows(old, indices_B1J)[:, 0])
            for old, new in ((past, latent), (rope_past, k_rope))
        )
        places_J = jnp.arange(indices_B1J.shape[-1], dtype=jnp.int32)
        q_latent = jnp.einsum("btnh,cnh->btnc", q, k_b)
        out_BTNC, lse = sparse_flash_attention(
            q_latent, q_rope, latent_BJC, k_rope_BJR, jnp.where(indices_B1J < 0, -1, places_J),
            scale=self.scale,
        )  # fmt: skip
        return jnp.einsum(
            "btnc,cnh->btnh", out_BTNC.astype(v_b.dtype), v_b, preferred_element_type=lse.dtype
        )

    def _warmup(self, q_idx, k_idx, w_idx, q, q_rope, latent, k_rope, segment_ids, k_b, v_b):
        out, lse, top = self._dense(q, q_rope, latent, k_rope, segment_ids, k_b, v_b)
        q_latent = jnp.einsum("btnh,cnh->btnc", q, k_b)
        main = jax.lax.stop_gradient((q_latent, q_rope, latent, k_rope, lse))
        kl_BT = indexer_kl(q_idx, k_idx, w_idx, *main, scale=self.scale, segment_ids=segment_ids)
        return out, _row_sums(kl_BT, segment_ids), top

    def _mass(self, q_idx, k_idx, w_idx, q, q_rope, latent, k_rope, segment_ids, k_b, v_b):
        indices = lightning_indexer(
            q_idx, k_idx, w_idx, top_k=self.dsa.top_k, segment_ids=segment_ids, order="any"
        )
        q_latent = jnp.einsum("btnh,cnh->btnc", q, k_b)
        return chosen_mass(q_latent, q_rope, latent, k_rope, indices, segment_ids, scale=self.scale)

    def masked_up_to(self) -> int:
        """Longest row in which other keys are masked; in longer ones the selected are gathered.

        Both give the same numbers but for rounding.
        """
        mla = self.cfg
        return crossover(
            self.dsa.top_k, H=mla.nope_dim + mla.rope_dim, h=mla.value_dim, C=mla.kv_latent,
            R=mla.rope_dim,
        )  # fmt: skip

    def _sparse(self, q_idx, k_idx, w_idx, q, q_rope, latent, k_rope, segment_ids, k_b, v_b):
        stopped = jax.lax.stop_gradient((q_idx, k_idx, w_idx))
        indices = lightning_indexer(
            *stopped, top_k=self.dsa.top_k, segment_ids=segment_ids, order="any"
        )
        indices = tag(indices, names.CHOSEN_KEYS)
        q_latent = jnp.einsum("btnh,cnh->btnc", q, k_b)
        absorbed = (q_latent, q_rope, latent, k_rope)
        if q.shape[1] <= self.masked_up_to():
            # in a row of at most top_k positions all keys that are visible have been selected
            chosen = indices if q.shape[1] > self.dsa.top_k else None
            heads = expanded(q, q_rope, latent, k_rope, k_b, v_b)
            out, lse = mla_attention(
                *heads, scale=self.scale, segment_ids=segment_ids, indices=chosen
            )
        else:
            out_BTNC, lse = sparse_flash_attention(*absorbed, indices, scale=self.scale)
            out = jnp.einsum(
                "btnc,cnh->btnh", out_BTNC.astype(v_b.dtype), v_b, preferred_element_type=lse.dtype
            )
        kl_B, top = jnp.zeros(segment_ids.shape[:1], lse.dtype), jnp.zeros((1, 0))
        if self.dsa.stage == "sparse":
            main = jax.lax.stop_gradient((*absorbed, lse))
            kl_BT = indexer_kl(
                q_idx,
                k_idx,
                w_idx,
                *main,
                scale=self.scale,
                indices=indices,
                segment_ids=segment_ids,
            )
            kl_B = _row_sums(kl_BT, segment_ids)
        if self.track_max_logit:
            top = sparse_max_logit(*absorbed, indices, scale=self.scale)[None]
        return out, kl_B, top


def _row_sums(kl_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(segment_ids_BT > 0, kl_BT, 0), axis=1)
