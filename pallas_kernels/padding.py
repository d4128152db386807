"""What stands in padding reaches nothing."""

import jax
import jax.numpy as jnp


def without_padding(segment_ids: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays [B, T, ...] with 0 where the id is 0 (or False), whatever stood there, NaN too.

    So are the gradients. Without ids the arrays are returned as they are, at no cost.
    """
    if segment_ids is None:
        return arrays
    real = segment_ids.astype(bool)
    return tuple(jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, 0) for x in arrays)
