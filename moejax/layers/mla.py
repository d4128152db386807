"""Gated multi-head latent attention in its expanded form (architecture section 3)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import MlaConfig
from moejax.layers.adapter import Drop, adapters_on, project
from moejax.layers.cache import LatentCache, Now
from moejax.layers.norm import RmsNorm
from moejax.layers.param import use, weight, wide
from moejax.layers.rope import At, rotate, softmax_scale_factor
from moejax.memory import names
from moejax.memory.names import tag
from moejax.partitioning import batch_local
from pallas_kernels.mla_attention import max_logit, mla_attention


class Latents(NamedTuple):
    """What attention needs of a layer input.

    Queries by head, and one key-value latent for all heads.
    """

    q_BTNH: jax.Array  # content part of the queries
    q_rope_BTNR: jax.Array  # rotated (or, without positions, plain) part
    latent_BTC: jax.Array  # normed key-value latent
    k_rope_BTR: jax.Array
    q_latent_BTQ: jax.Array | None  # normed query latent, which an indexer reads


class Mla(nnx.Module):
    """Reads [B, T, D] and segment ids, gives [B, T, D] and a dict of auxiliary values."""

    def __init__(
        self, dim: int, cfg: MlaConfig, std: float, rngs: nnx.Rngs, *, track_max_logit: bool = False
    ):
        N, H, R, C, h = cfg.num_heads, cfg.nope_dim, cfg.rope_dim, cfg.kv_latent, cfg.value_dim
        self.cfg, self.track_max_logit = cfg, track_max_logit
        self.scale = (H + R) ** -0.5 * softmax_scale_factor(cfg)
        head: dict[str, Any] = {"std": std, "matrix": (-3, -1), "head_axis": -2}
        if cfg.q_latent:
            self.q_a = weight(rngs, (dim, cfg.q_latent), ("embed", None), std=std)
            self.q_norm = RmsNorm(cfg.q_latent, cfg.latent_eps)
            self.q_b = weight(rngs, (cfg.q_latent, N, H + R), ("latent", "heads", None), **head)
        else:
            self.q = weight(rngs, (dim, N, H + R), ("embed", "heads", None), **head)
        self.kv_a = weight(rngs, (dim, C + R), ("embed", None), std=std)
        self.kv_norm = RmsNorm(C, cfg.latent_eps)
        self.k_b = weight(rngs, (C, N, H), ("latent", "heads", None), **head)
        self.v_b = weight(rngs, (C, N, h), ("latent", "heads", None), **head)
        if cfg.output_gate != "none":
            width = N * h if cfg.output_gate == "elementwise" else N
            self.gate = weight(rngs, (dim, width), ("embed", "heads"), std=std)
        self.o = weight(rngs, (N * h, dim), ("heads", "embed"), std=std)

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array, drop: Drop | None = None
    ) -> tuple[jax.Array, dict]:
        parts = self.latents(x_BTD, drop=drop)
        out_BTNh, aux = self.attend(x_BTD, parts, segment_ids_BT, drop)
        return self.project_out(x_BTD, out_BTNh, drop), aux

    def cached(self, x_BTD: jax.Array, cache: Any, now: Now) -> tuple[jax.Array, Any]:
        """Output for the tokens at hand, and their rows for the cache.

        A fresh row attends as in training. After that tokens come one by one, and attend to the
        cached latents themselves: no key or value of the past is ever expanded.
        """
        at = None if now.fresh else At(now.position, cache.latent.shape[1])
        parts = self.latents(x_BTD, at)
        if now.fresh:
            out_BTNh, _ = self.attend(x_BTD, parts, now.segment_ids(x_BTD.shape[1]))
        else:
            out_BTNh = self.attend_cached(x_BTD, parts, cache, now)
        rows = LatentCache(parts.latent_BTC, parts.k_rope_BTR)
        return self.project_out(x_BTD, out_BTNh), rows

    def attend_cached(self, x_B1D: jax.Array, parts: Latents, cache: Any, now: Now) -> jax.Array:
        """Attention of one token over the cache and itself: float32 [B, 1, N, h]."""
        run = batch_local(self._absorbed, (0,) * 7)
        rows = (cache.latent, cache.k_rope, now.padding_B, now.position)
        return run(*parts[:4], *rows, *self.kv_maps(x_B1D.dtype))

    def kv_maps(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The maps from the latent to keys [C,N,H] and values [C,N,h], their adapter within.

        Absorbed attention reads the maps themselves: no input passes through them that an adapter
        could read beside.
        """
        k_b_CNH, v_b_CNh = use(self.k_b, dtype), use(self.v_b, dtype)
        for _, adapter in adapters_on(self, "k_b"):
            delta_CNX = adapter.delta(dtype)
            k_b_CNH += delta_CNX[..., : k_b_CNH.shape[-1]]
            v_b_CNh += delta_CNX[..., k_b_CNH.shape[-1] :]
        return k_b_CNH, v_b_CNh

    def _absorbed(self, q, q_rope, latent, k_rope, past, rope_past, padding_B, position, k_b, v_b):
        put = jax.lax.dynamic_update_slice_in_dim
        latent_BSC, k_rope_BSR = (
            put(old, new, position, 1) for old, new in ((past, latent), (rope_past, k_rope))
        )
        full = wide(q.dtype)
        q_latent_BTNC = jnp.einsum("btnh,cnh->btnc", q, k_b)
        score = {"preferred_element_type": full}
        s_BTNS = jnp.einsum("btnc,bsc->btns", q_latent_BTNC, latent_BSC, **score)
        s_BTNS = s_BTNS + jnp.einsum("btnr,bsr->btns", q_rope, k_rope_BSR, **score)
        places_S = jnp.arange(latent_BSC.shape[1], dtype=jnp.int32)
        # Itself every token sees, so that rows of nothing but padding stay finite.
        seen_BS = (places_S >= padding_B[:, None]) & (places_S <= position) | (places_S == position)
        s_BTNS = jnp.where(seen_BS[:, None, None], self.scale * s_BTNS, -jnp.inf)
        p_BTNS = jnp.exp(s_BTNS - jnp.max(s_BTNS, -1, keepdims=True))
        total_BTN1 = jnp.sum(p_BTNS, -1, keepdims=True)
        out_BTNC = jnp.einsum("btns,bsc->btnc", p_BTNS.astype(q.dtype), latent_BSC, **score)
        out_BTNC = (out_BTNC / total_BTN1).astype(q.dtype)
        return jnp.einsum("btnc,cnh->btnh", out_BTNC, v_b, **score)

    def latents(
        self, x_BTD: jax.Array, at: At | None = None, *, drop: Drop | None = None
    ) -> Latents:
        """Queries and latents of every position, rotated where the config rotates."""
        cfg = self.cfg
        source, q_latent = x_BTD, None
        if cfg.q_latent:
            q_a_BTQ = tag(project(self, "q_a", x_BTD, drop=drop), names.MLA_LATENTS)
            source = q_latent = self.q_norm(q_a_BTQ)
        q_BTNH = project(self, "q_b" if cfg.q_latent else "q", source, drop=drop)
        q_BTNH = tag(q_BTNH, names.MLA_QUERIES)
        both_BTC = tag(project(self, "kv_a", x_BTD, drop=drop), names.MLA_LATENTS)
        latent_BTC = self.kv_norm(both_BTC[..., : cfg.kv_latent])
        k_rope_BT1R = rotate(both_BTC[..., None, cfg.kv_latent :], cfg, cfg.rope, at)
        q_rope_BTNR = rotate(q_BTNH[..., cfg.nope_dim :], cfg, cfg.rope, at)
        return Latents(
            q_BTNH[..., : cfg.nope_dim], q_rope_BTNR, latent_BTC, k_rope_BT1R[..., 0, :], q_latent
        )

    def attend(
        self, x_BTD: jax.Array, parts: Latents, segment_ids_BT: jax.Array,
        drop: Drop | None = None,
    ) -> tuple[jax.Array, dict]:  # fmt: skip
        """Softmax attention over all visible keys.

        Returns:
          float32 [B, T, N, h], and the largest logit where asked.
        """
        run = batch_local(self._dense, (0,) * 5)
        out, _, top = run(*parts[:4], segment_ids_BT, *self.kv_maps(x_BTD.dtype))
        return out, self._max_aux(top)

    def _dense(self, q_BTNH, q_rope_BTNR, latent_BTC, k_rope_BTR, segment_ids_BT, k_b_CNH, v_b_CNh):
        """Expanded attention of local rows.

        Returns:
          Output, log-sum-exp, largest logit [1, N] (empty when not tracked).
        """
        q, k, v = expanded(q_BTNH, q_rope_BTNR, latent_BTC, k_rope_BTR, k_b_CNH, v_b_CNh)
        out, lse = mla_attention(q, k, v, scale=self.scale, segment_ids=segment_ids_BT)
        top = jnp.zeros((1, 0))
        if self.track_max_logit:
            top = max_logit(q, k, scale=self.scale, segment_ids=segment_ids_BT)[None]
        return out, lse, top

    def _max_aux(self, top_ZN: jax.Array) -> dict:
        return {"max_logit": jnp.max(top_ZN, axis=0)} if self.track_max_logit else {}

    def project_out(
        self, x_BTD: jax.Array, out_BTNh: jax.Array, drop: Drop | None = None
    ) -> jax.Array:
        """Gate in float32, one rounding, output projection."""
        dtype = x_BTD.dtype
        if self.cfg.output_gate != "none":
            gate_BTX = tag(project(self, "gate", x_BTD, drop=drop), names.MLA_GATE)
            logits = gate_BTX.astype(wide(dtype))
            out_BTNh = out_BTNh * jax.nn.sigmoid(logits).reshape(*out_BTNh.shape[:3], -1)
        flat = out_BTNh.astype(dtype).reshape(*x_BTD.shape[:2], -1)
        return tag(project(self, "o", flat, drop=drop), names.ATTENTION_OUT)


def expanded(
    q_BTNH: jax.Array, q_rope_BTNR: jax.Array, latent_BTC: jax.Array, k_rope_BTR: jax.Array,
    k_b_CNH: jax.Array, v_b_CNh: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Queries and keys [B, T, N, H + R] and values [B, T, N, h] of every head."""
    k_BTNH = jnp.einsum("btc,cnh->btnh", latent_BTC, k_b_CNH)
    v_BTNh = jnp.einsum("btc,cnh->btnh", latent_BTC, v_b_CNh)
    k_rope_BTNR = jnp.broadcast_to(k_rope_BTR[:, :, None], q_rope_BTNR.shape)
    q = jnp.concatenate([q_BTNH, q_rope_BTNR], -1)
    return q, jnp.concatenate([k_BTNH, k_rope_BTNR], -1), v_BTNh
