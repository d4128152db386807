"""In which dtype sums and states are kept."""

from typing import Any

import jax.numpy as jnp


def sum_dtype(*arrays: Any) -> Any:
    """float64 if any array is, else float32; not asked of JAX, which strict promotion forbids."""
    return jnp.float64 if any(a.dtype == jnp.float64 for a in arrays) else jnp.float32
