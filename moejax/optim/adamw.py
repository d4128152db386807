"""AdamW direction for vectors, embeddings and the output head; global-norm clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from moejax.config import OptimConfig
from moejax.typing import Array, PyTree


def adam_direction(cfg: OptimConfig) -> optax.GradientTransformation:
    """`m / (sqrt(v) + eps)` with bias-corrected moments in float32.

    The decay that makes it AdamW, and the learning rate, come from the parameter's group.

    Source: Decoupled weight decay regularization, arXiv:1711.05101.
    """
    return optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps, mu_dtype=jnp.float32)


def global_norm(tree: PyTree) -> Array:
    """`sqrt(sum of squares)` over all leaves: squares, sums and result in float32.

    On a sharded tree the sums run over whole arrays, so every mesh gets one and the same norm.
    """
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.zeros((), jnp.float32)))


def clip_by_global_norm(max_norm: float, norm: Array | None = None) -> optax.GradientTransformation:
    """Scales gradients by `min(1, max_norm / norm)`; norm is their global norm unless given.

    A norm of at most `max_norm` leaves every bit as it is; a norm of NaN makes every update NaN.
    """

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        length = global_norm(updates) if norm is None else norm
        scale = 1.0 / jnp.maximum(1.0, length / max_norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
