"""Gated activations of an expert: the first half of the columns is the gate, the second the up."""

import jax
import jax.numpy as jnp

NAMES = ("situ", "swiglu")


def gated(h, activation, situ_betas):
    """[..., 2F] in the accumulation dtype -> [..., F].

    situ(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2); without b2 the up stays linear.
    swiglu(g, u) = g sigmoid(g) * u
    """
    return gated_pair(*jnp.split(h, 2, axis=-1), activation, situ_betas)


def gated_pair(gate, up, activation, situ_betas):
    """`gated` of the two halves [..., F]."""
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    beta, linear_beta = situ_betas
    if linear_beta is not None:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up
