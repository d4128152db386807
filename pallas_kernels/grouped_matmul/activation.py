"""Gated activations of an expert: the first half of the columns is the gate, the second the up."""

import jax
import jax.numpy as jnp

NAMES = ("situ", "swiglu")


def gated(h, activation, situ_betas):
    """[..., 2F] in the accumulation dtype -> [..., F].

    situ(g, u) = b1 tanh(g / b1) sigmoid(g) * b2 tanh(u / b2); without b2 the up stays linear.
    swiglu(g, u) = g sigmoid(g) * u
    """
    gate, up = jnp.split(h, 2, axis=-1)
    return gated_pair(gate, up, activation, situ_betas)


def gated_pair(gate, up, activation, situ_betas):
    """`gated` of the two halves [..., F]."""
    if activation == "swiglu":
        return jax.nn.silu(gate) * up
    beta, linear_beta = situ_betas
    if linear_beta is not None:
        up = linear_beta * jnp.tanh(up / linear_beta)
    return beta * jnp.tanh(gate / beta) * jax.nn.sigmoid(gate) * up


def pair_gradients(gate, up, d_out, activation, situ_betas):
    """Gradients of gate and up in `gated_pair`; written out they take half of JAX's registers."""
    share = jax.nn.sigmoid(gate)
    if activation == "swiglu":
        return d_out * up * share * (1 + gate * (1 - share)), d_out * gate * share
    beta, linear_beta = situ_betas
    tanh_gate = jnp.tanh(gate / beta)
    value = beta * tanh_gate * share
    slope = (1 - tanh_gate * tanh_gate) * share + value * (1 - share)
    if linear_beta is None:
        return d_out * up * slope, d_out * value
    tanh_up = jnp.tanh(up / linear_beta)
    return d_out * (linear_beta * tanh_up) * slope, d_out * value * (1 - tanh_up * tanh_up)
