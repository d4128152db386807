"""QK-clip: shrinks the query and key weights of heads whose attention logits grew too large."""

from __future__ import annotations

import jax.numpy as jnp

from moejax.typing import Array, Float


def qk_clip_factors(max_logit: Float[Array, "*X N"], tau: float) -> Float[Array, "*X N"]:
    """How much each head's logits must shrink: `tau / S` where S > tau, else exactly 1.

    Args:
      max_logit: largest logit before the softmax that each head saw in the step, float32.
      tau: largest logit allowed, above 0 (100 in the published recipe).
    Source: Kimi K2, arXiv:2507.20534, MuonClip.
    """
    return jnp.where(max_logit > tau, tau / max_logit, 1.0)


def clip_query(
    q_b: Float[Array, "*X Q N HR"], gamma: Float[Array, "*X N"], nope_dim: int
) -> Float[Array, "*X Q N HR"]:
    """Query weights of MLA: content columns (the first `nope_dim`) x sqrt(gamma), rope x gamma.

    The rope part carries all of gamma because its key is shared by the heads and stays as it is.

    Raises:
      ValueError: `nope_dim` is larger than a query head.
    """
    if not 0 <= nope_dim <= q_b.shape[-1]:
        raise ValueError(f"nope_dim={nope_dim} must be from 0 to the head width {q_b.shape[-1]}.")
    gamma = gamma[..., None, :, None]
    is_content = jnp.arange(q_b.shape[-1]) < nope_dim
    return q_b * jnp.where(is_content, jnp.sqrt(gamma), gamma).astype(q_b.dtype)


def clip_key(
    k_b: Float[Array, "*X C N H"], gamma: Float[Array, "*X N"]
) -> Float[Array, "*X C N H"]:
    """Content key weights of MLA: x sqrt(gamma)."""
    return k_b * jnp.sqrt(gamma)[..., None, :, None].astype(k_b.dtype)
