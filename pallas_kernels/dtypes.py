"""In which dtype sums and states are kept."""

from typing import Any

import jax.numpy as jnp


def sum_dtype(*arrays: Any) -> Any:
    """float64 if any array is, else float32. Written out, since strict promotion forbids asking JAX."""
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32
