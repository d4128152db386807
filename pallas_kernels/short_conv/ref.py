"""Short convolution position by position, with an explicit history."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.padding import without_padding


def short_conv(x, taps, *, segment_ids, initial_state, activation):
    """One `lax.scan` step a position; shapes as in `api.short_conv`."""
    dtype = sum_dtype(x, taps)
    B, T, X = x.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, taps.shape[0] - 1, X), dtype)
    (x,) = without_padding(segment_ids, x)
    ids = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
    starts = ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)

    def step(history_BKX, inputs):
        x_BX, starts_B = inputs
        history_BKX = jnp.where(starts_B[:, None, None], 0, history_BKX)
        window = jnp.concatenate([history_BKX, x_BX[:, None]], axis=1)
        y_BX = jnp.sum(window * taps.astype(dtype), axis=1)
        return window[:, 1:], jax.nn.silu(y_BX) if activation == "silu" else y_BX

    xs = (jnp.moveaxis(x.astype(dtype), 1, 0), jnp.moveaxis(starts, 1, 0))
    state, y = jax.lax.scan(step, initial_state.astype(dtype), xs)
    (y,) = without_padding(segment_ids, jnp.moveaxis(y, 0, 1))
    return y.astype(x.dtype), state.astype(x.dtype)
