"""Gated feed-forward: SiTU-GLU or SwiGLU (architecture section 5.1)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import FfnConfig
from moejax.layers.adapter import Drop, project
from moejax.layers.param import weight, wide
from moejax.memory import names
from moejax.memory.names import tag
from moejax.typing import Array, Float


def situ(
    gate: Float[Array, "*B F"], up: Float[Array, "*B F"], beta=4.0, linear_beta=25.0
) -> Float[Array, "*B F"]:
    """``beta tanh(gate/beta) sigmoid(gate) · linear_beta tanh(up/linear_beta)``.

    float32 inside, gate's dtype out.
    """
    g, u = (a.astype(wide(a.dtype)) for a in (gate, up))
    out = beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * linear_beta * jnp.tanh(u / linear_beta)
    return out.astype(gate.dtype)


def swiglu(gate: Float[Array, "*B F"], up: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
    """``silu(gate) · up``, float32 inside."""
    g, u = (a.astype(wide(a.dtype)) for a in (gate, up))
    return (jax.nn.silu(g) * u).astype(gate.dtype)


def activate(gate: jax.Array, up: jax.Array, cfg: FfnConfig) -> jax.Array:
    """The activation the config names."""
    if cfg.activation == "situ":
        return situ(gate, up, cfg.situ_beta, cfg.situ_linear_beta)
    return swiglu(gate, up)


class Glu(nnx.Module):
    """``activate(x W_gate, x W_up) W_down``.

    A dense FFN, or the shared experts of an MoE layer as one.
    """

    def __init__(self, dim: int, inner: int, cfg: FfnConfig, std: float, rngs: nnx.Rngs):
        self.cfg = cfg
        self.gate_up = weight(
            rngs, (dim, 2, inner), ("embed", None, "ffn"), std=std, matrix=(-3, -1)
        )
        self.down = weight(rngs, (inner, dim), ("ffn", "embed"), std=std)

    def __call__(self, x_BTD: jax.Array, drop: Drop | None = None) -> jax.Array:
        both = tag(project(self, "gate_up", x_BTD, drop=drop), names.GLU_GATE_UP)
        hidden_BTF = activate(both[..., 0, :], both[..., 1, :], self.cfg)
        return project(self, "down", hidden_BTF, drop=drop)
