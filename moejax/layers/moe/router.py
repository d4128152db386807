"""Choosing experts: scores, biased selection, group limits, combine weights.

Architecture section 5.1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from moejax.config import MoeConfig
from moejax.layers.adapter import Drop, project
from moejax.layers.param import Balance, weight, wide
from moejax.memory import names
from moejax.memory.names import tag
from moejax.partitioning import batch_local
from moejax.typing import Array, Float, Int


def scores_of(logits: Float[Array, "*B E"], score: str) -> Float[Array, "*B E"]:
    """Router scores in (0, 1): sigmoid of each logit, or softmax over experts."""
    return jax.nn.sigmoid(logits) if score == "sigmoid" else jax.nn.softmax(logits, -1)


def route(
    logits: Float[Array, "*B E"],
    bias: Float[Array, " E"],
    *,
    top_k: int,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    renormalize: bool = True,
    score: str = "sigmoid",
    weights_use_bias: bool = False,
) -> tuple[Int[Array, "*B A"], Float[Array, "*B A"]]:
    """The `top_k` experts of each token and their combine weights.

    Selection is by score + bias, the lowest index first in ties; weights are the un-biased scores
    (unless `weights_use_bias`), divided by their sum when `renormalize`, times `scale`. The
    selection has no gradient.

    Args:
      logits: float32, experts last.
      bias: float32 balancing bias; acts on the choice only.
      num_groups, top_groups: experts form runs of E / num_groups; only the best `top_groups` runs,
        ranked by the sum of their two largest biased scores, stay open.
    Returns:
      int32 ids, float32 weights.
    Source: DeepSeek-V3, arXiv:2412.19437; Kimi K3 report.
    """
    scores = scores_of(logits, score)
    choice = lax.stop_gradient(scores + bias)
    if num_groups > 1:
        choice = _close_groups(choice, num_groups, top_groups)
    _, ids = lax.top_k(choice, top_k)
    from_ = scores + lax.stop_gradient(bias) if weights_use_bias else scores
    return ids, combine_weights(from_, ids, scale, renormalize)


def combine_weights(
    scores: Float[Array, "*B E"], ids: Int[Array, "*B A"], scale: float, renormalize: bool
) -> Float[Array, "*B A"]:
    """Weights of chosen experts: their scores, divided by their sum, times `scale`."""
    weights = jnp.take_along_axis(scores, ids, -1)
    if renormalize:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + 1e-20)
    return weights * scale


def _close_groups(choice: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    by_group = choice.reshape(*choice.shape[:-1], num_groups, -1)
    best_two = lax.top_k(by_group, min(2, by_group.shape[-1]))[0].sum(-1)
    _, open_groups = lax.top_k(best_two, top_groups)
    is_open = jax.nn.one_hot(open_groups, num_groups, dtype=jnp.bool).any(-2)
    return jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(choice.shape)


class Router(nnx.Module):
    """Linear map to E logits in float32, and the balancing bias (state, not a parameter)."""

    def __init__(self, dim: int, cfg: MoeConfig, std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        self.weight = weight(rngs, (dim, cfg.num_experts), ("embed", "router"), std=std)
        self.bias = Balance(jnp.zeros(cfg.num_experts, jnp.float32), axes=(None,))

    def __call__(
        self, x_BTD: jax.Array, pinned_BTA: jax.Array | None = None, drop: Drop | None = None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Ids [B,T,A], weights [B,T,A], scores [B,T,E].

        Args:
          pinned_BTA: experts to take instead of the chosen ones; weights are theirs.
        """
        cfg, full = self.cfg, wide(x_BTD.dtype)
        logits = project(self, "weight", x_BTD.astype(full), drop=drop, precision="highest")
        logits = tag(logits, names.ROUTER)
        # Per device: XLA gathers the whole batch before a top-k that it partitions itself.
        ids, weights = batch_local(self._route, (0,))(logits, self.bias[...])
        scores = scores_of(logits, cfg.score)
        if pinned_BTA is not None:
            ids = pinned_BTA
            from_ = scores + self.bias[...] if cfg.weights_use_bias else scores
            weights = combine_weights(from_, ids, cfg.route_scale, cfg.renormalize)
        return ids, weights, scores

    def _route(self, logits: jax.Array, bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
        cfg = self.cfg
        return route(
            logits, bias_E, top_k=cfg.top_k, num_groups=cfg.num_groups, top_groups=cfg.top_groups,
            scale=cfg.route_scale, renormalize=cfg.renormalize, score=cfg.score,
            weights_use_bias=cfg.weights_use_bias,
        )  # fmt: skip
