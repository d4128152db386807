"""Short convolution position by position, with an explicit history."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype


def short_conv(x, taps, *, segment_ids, initial_state, activation):
    """One `lax.scan` step a position; shapes as in `api.short_conv`."""
    dtype = sum_dtype(x, taps)
    B, T, X = x.shape
    if initial_state is None:
        initial_state = jnp.zeros((B, taps.shape[0] - 1, X), dtype)
    if segment_ids is None:
        segment_ids = jnp.ones((B, T), jnp.int32)
    previous = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], axis=1)

    def step(history_BKX, inputs):
        x_BX, starts_B = inputs
        history_BKX = jnp.where(starts_B[:, None, None], 0, history_BKX)
        window = jnp.concatenate([history_BKX, x_BX[:, None]], axis=1)
        y_BX = jnp.sum(window * taps.astype(dtype), axis=1)
        return window[:, 1:], jax.nn.silu(y_BX) if activation == "silu" else y_BX

    xs = (jnp.moveaxis(x.astype(dtype), 1, 0), jnp.moveaxis(segment_ids != previous, 1, 0))
    state, y = jax.lax.scan(step, initial_state.astype(dtype), xs)
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), state.astype(x.dtype)
