"""The arithmetic of gated_norm on a block of rows, as kernels for GPUs and TPUs have it."""

import jax
import jax.numpy as jnp
from jax import lax


def as_rows(norm, x, gate, weight):
    """`norm(x [R, h], gate [R, h], weight [h] in float32)` of arrays with any leading dims."""
    if any(a.dtype == jnp.float64 for a in (x, gate, weight)):
        raise NotImplementedError("float64 has no kernel")
    if x.size == 0:
        raise NotImplementedError("an empty array needs no kernel")
    flat = (-1, x.shape[-1])
    y_Rh = norm(x.reshape(flat), gate.reshape(flat), weight.astype(jnp.float32))
    return y_Rh.reshape(x.shape)


def _parts(x_rh, gate_rh, width, eps):
    wide_rh = x_rh.astype(jnp.float32)
    # columns behind the width are 0
    mean_r1 = jnp.sum(wide_rh * wide_rh, axis=1, keepdims=True) / width
    inverse_r1 = lax.rsqrt(mean_r1 + eps)
    return wide_rh * inverse_r1, inverse_r1, jax.nn.sigmoid(gate_rh.astype(jnp.float32))


def forward(x_rh, gate_rh, weight_1h, width, eps):
    """Output, in float32."""
    norm_rh, _, opening_rh = _parts(x_rh, gate_rh, width, eps)
    return norm_rh * weight_1h * opening_rh


def backward(x_rh, gate_rh, weight_1h, dy_rh, width, eps):
    """Gradients of x and of the gate, and each row's share of the weight's, in float32."""
    norm_rh, inverse_r1, opening_rh = _parts(x_rh, gate_rh, width, eps)
    share_rh = dy_rh.astype(jnp.float32) * opening_rh * norm_rh
    d_norm_rh = dy_rh.astype(jnp.float32) * opening_rh * weight_1h
    mean_r1 = jnp.sum(d_norm_rh * norm_rh, axis=1, keepdims=True) / width
    dx_rh = inverse_r1 * (d_norm_rh - norm_rh * mean_r1)
    return dx_rh, d_norm_rh * norm_rh * (1 - opening_rh), share_rh
