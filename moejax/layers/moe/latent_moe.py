"""Stable LatentMoE, and plain MoE as its case without a latent (architecture section 5)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.adapter import Drop, project
from moejax.layers.ffn import Glu
from moejax.layers.moe.balance import aux_loss_rows, histogram
from moejax.layers.moe.experts import Experts
from moejax.layers.moe.placement import MAX_PLACES, Spread, canonical, look_up, place_tables
from moejax.layers.moe.router import Router
from moejax.layers.norm import RmsNorm
from moejax.layers.param import Balance, weight
from moejax.memory import names
from moejax.memory.names import tag
from moejax.partitioning import batch_local
from moejax.partitioning.expert_exchange import Copies, exchange_experts
from pallas_kernels.permute import plan_permute


class LatentMoe(nnx.Module):
    """Router on the full width, experts on a latent, shared experts on the full width again."""

    def __init__(
        self, dim: int, cfg: MoeConfig, ffn: FfnConfig, eps: float, std: float, rngs: nnx.Rngs, *,
        spread: Spread | None = None,
    ):  # fmt: skip
        """
        Args:
          spread: experts may lie in other slots than their numbers say, over these devices; where
            they do is state of the layer, which whoever moves the weights keeps up. None: they lie
            in the order of their numbers.
        """
        self.cfg, self.spread = cfg, spread
        self.router = Router(dim, cfg, std, rngs)
        if cfg.latent_dim:
            self.latent_down = weight(rngs, (dim, cfg.latent_dim), ("embed", None), std=std)
            self.latent_up = weight(rngs, (cfg.latent_dim, dim), (None, "embed"), std=std)
            if cfg.latent_norm:
                self.latent_norm = RmsNorm(cfg.latent_dim, eps)
        self.experts = Experts(cfg.latent_dim or dim, cfg, ffn, std, rngs)
        if cfg.num_shared:
            self.shared = Glu(dim, cfg.num_shared * cfg.expert_dim, ffn, std, rngs)
        if spread is not None:
            (places_EK,), (sources_K,) = place_tables(canonical(1, cfg.num_experts, spread))
            self.places = Balance(jnp.asarray(places_EK), axes=(None, None))
            if spread.copies:
                self.sources = Balance(jnp.asarray(sources_K), axes=(None,))

    def __call__(
        self, x_BTD: jax.Array, segment_ids_BT: jax.Array, pinned_BTA: jax.Array | None = None,
        drop: Drop | None = None,
    ) -> tuple[jax.Array, dict]:  # fmt: skip
        cfg = self.cfg
        valid_BT = segment_ids_BT > 0
        ids_BTA, weights_BTA, scores_BTE = self.router(x_BTD, pinned_BTA, drop)
        aux = self._balance_aux(ids_BTA, scores_BTE, valid_BT)
        # Padding goes to no expert; so do, where a capacity is set, the tokens past it (and those
        # are counted).
        sent_BTA = jnp.where(valid_BT[..., None], ids_BTA, cfg.num_experts)
        if cfg.capacity_factor:
            kept_BTA = batch_local(self._within_capacity, (0,))(sent_BTA)
            aux["dropped"] = jnp.sum((kept_BTA != sent_BTA), dtype=jnp.int32)
            sent_BTA = kept_BTA
        latent_BTL = x_BTD
        if cfg.latent_dim:
            latent_BTL = tag(project(self, "latent_down", x_BTD, drop=drop), names.LATENT)
        routed_BTL, stats = exchange_experts(
            latent_BTL, self._places(sent_BTA), weights_BTA,
            self.experts.weights(), self.experts.row_fn(),
            num_experts=self._num_places(), copies=self._copies(),
            weight_axes=self.experts.axes(), prepare=self.experts.prepare,
            exchange=cfg.exchange, slices=cfg.exchange_slices,
            level=cfg.exchange_level, hosts=cfg.exchange_hosts or 1,
            buffer_factor=cfg.buffer_factor, receive_factor=cfg.receive_factor,
        )  # fmt: skip
        aux |= {"rounds": stats.rounds, "sent_bytes": stats.sent_bytes}
        aux["sent_bytes_network"] = stats.network_bytes
        return self._finish(x_BTD, routed_BTL, drop), aux

    def _places(self, ids_BTA: jax.Array) -> jax.Array:
        """Where the exchange finds the experts of each token; copies take turns by its number."""
        if self.spread is None:
            return ids_BTA
        edge = ((0, 1), (0, 0))  # "no expert": every entry of its row is past the last place
        table_EK = jnp.pad(self.places[...], edge, constant_values=self._num_places())
        B, T, _ = ids_BTA.shape
        turn_BT = jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
        return batch_local(look_up, (0, 0))(ids_BTA, turn_BT, table_EK)

    def _num_places(self) -> int:
        num_experts = self.cfg.num_experts
        return num_experts if self.spread is None else self.spread.num_places(num_experts)

    def _copies(self) -> Copies | None:
        if self.spread is None or not self.spread.copies:
            return None
        return Copies(self.sources[...], MAX_PLACES - 1)

    def _finish(
        self, x_BTD: jax.Array, routed_BTL: jax.Array, drop: Drop | None = None
    ) -> jax.Array:
        out = routed_BTL
        if self.cfg.latent_dim:
            out = self.latent_norm(out) if self.cfg.latent_norm else out
            out = project(self, "latent_up", out, drop=drop)
        return out + self.shared(x_BTD, drop) if self.cfg.num_shared else out

    def _balance_aux(self, ids_BTA, scores_BTE, valid_BT) -> dict:
        """Load of every expert, and what the chosen balancing needs.

        Summed over the batch, without gradient.
        """
        measure = batch_local(self._measure, (0,) * 3)
        bias_E = self.router.bias[...]
        load_ZE, counts_ZEb = measure(ids_BTA, jax.lax.stop_gradient(scores_BTE), valid_BT, bias_E)
        aux = {"load": load_ZE.sum(0), "dropped": jnp.zeros((), jnp.int32)}
        if self.cfg.balance == "quantile":
            aux["bias_counts"] = counts_ZEb.sum(0)
        if self.cfg.aux_weight or self.cfg.balance == "aux":
            aux["aux_loss"] = jnp.sum(aux_loss_rows(scores_BTE, ids_BTA, valid_BT))
        return aux

    def _measure(self, ids_BTA, scores_BTE, valid_BT, bias_E):
        E = self.cfg.num_experts
        counted = jnp.broadcast_to(valid_BT[..., None], ids_BTA.shape).astype(jnp.int32)
        load_E = jnp.zeros(E, jnp.int32).at[ids_BTA.reshape(-1)].add(counted.reshape(-1))
        if self.cfg.balance != "quantile":
            return load_E[None], jnp.zeros((1, E, 0), jnp.int32)
        counts = histogram(scores_BTE.reshape(-1, E), bias_E, valid_BT.reshape(-1), self.cfg.top_k)
        return load_E[None], counts[None]

    def _within_capacity(self, ids_BTA: jax.Array) -> jax.Array:
        """Ids with those past an expert's capacity turned to "no expert".

        An expert takes at most ⌈capacity_factor · T · A / E⌉ tokens of each row, earliest first: a
        rule about rows, so that what is dropped does not depend on the mesh.
        """
        _, T, A = ids_BTA.shape
        E = self.cfg.num_experts
        capacity = math.ceil(self.cfg.capacity_factor * T * A / E)

        def one_row(ids_TA):
            plan = plan_permute(ids_TA, E)
            starts_E = jnp.cumsum(plan.group_sizes) - plan.group_sizes
            rank_TA = plan.positions - starts_E[jnp.minimum(ids_TA, E - 1)]
            return jnp.where(rank_TA < capacity, ids_TA, E)

        return jax.vmap(one_row)(ids_BTA)
