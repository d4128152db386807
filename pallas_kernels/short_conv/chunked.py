"""Short convolution as a few shifted multiply-adds; the gradient saves the inputs only.

XLA fuses the shifts into one pass, which `conv_general_dilated` with one group a channel is not.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.padding import without_padding


def short_conv(x, taps, *, segment_ids, initial_state, activation):
    """`api.short_conv` with every default filled in."""
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], taps.shape[0] - 1, x.shape[2]), x.dtype)
    return _conv(activation, x, taps, segment_ids, initial_state)


def _history(x, initial_state, segment_ids):
    """x without padding behind its initial state, [B, K-1+T, X], and the ids of all of it."""
    (x,) = without_padding(segment_ids, x)
    history = jnp.concatenate([initial_state.astype(x.dtype), x], axis=1)
    if segment_ids is None:
        return history, None
    # the initial state belongs to the row's first document
    return history, jnp.pad(segment_ids, ((0, 0), (initial_state.shape[1], 0)), mode="edge")


def _kept(j, num_taps, segment_ids, values):
    """`values` [B, T, X] where tap j of the position looks into the position's own document."""
    if segment_ids is None or j == num_taps - 1:
        return values
    T = values.shape[1]
    same = segment_ids[:, j : j + T] == segment_ids[:, num_taps - 1 :]
    return jnp.where(same[..., None], values, 0)


def _in_last_document(values, segment_ids):
    """The K-1 values at the row's end, 0 before the start of its last document."""
    if segment_ids is None:
        return values
    num = values.shape[1]
    same = segment_ids[:, segment_ids.shape[1] - num :] == segment_ids[:, -1:]
    return jnp.where(same[..., None], values, 0)


def _sum_of_taps(history, taps, segment_ids, dtype):
    K, T = taps.shape[0], history.shape[1] - taps.shape[0] + 1
    taps = taps.astype(dtype)
    terms = (
        taps[j] * _kept(j, K, segment_ids, history[:, j : j + T].astype(dtype)) for j in range(K)
    )
    return sum(terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(activation, x, taps, segment_ids, initial_state):
    history, ids = _history(x, initial_state, segment_ids)
    y = _sum_of_taps(history, taps, ids, sum_dtype(x, taps))
    (y,) = without_padding(segment_ids, jax.nn.silu(y) if activation == "silu" else y)
    return y.astype(x.dtype), _in_last_document(history[:, x.shape[1] :], ids)


def _conv_fwd(activation, x, taps, segment_ids, initial_state):
    outputs = _conv(activation, x, taps, segment_ids, initial_state)
    return outputs, (x, taps, segment_ids, initial_state)


def _conv_bwd(activation, residuals, cotangents):
    x, taps, segment_ids, initial_state = residuals
    dy, d_final = cotangents
    dtype = sum_dtype(x, taps)
    K, T = taps.shape[0], x.shape[1]
    history, ids = _history(x, initial_state, segment_ids)
    (dy,) = without_padding(segment_ids, dy.astype(dtype))
    if activation == "silu":
        y = _sum_of_taps(history, taps, ids, dtype)
        gate = jax.nn.sigmoid(y)
        dy = dy * gate * (1 + y * (1 - gate))
    d_history = jnp.pad(_in_last_document(d_final.astype(dtype), ids), ((0, 0), (T, 0), (0, 0)))
    d_taps_K = []
    for j in range(K):
        d_term = _kept(j, K, ids, dy)
        seen = history[:, j : j + T].astype(dtype)
        d_taps_K.append(jnp.sum(d_term * seen, axis=(0, 1)))
        shifted = jnp.pad(taps[j].astype(dtype) * d_term, ((0, 0), (j, K - 1 - j), (0, 0)))
        d_history = d_history + shifted
    (dx,) = without_padding(segment_ids, d_history[:, K - 1 :])
    d_taps = jnp.stack(d_taps_K).astype(taps.dtype)
    return dx.astype(x.dtype), d_taps, None, d_history[:, : K - 1].astype(initial_state.dtype)


_conv.defvjp(_conv_fwd, _conv_bwd)
