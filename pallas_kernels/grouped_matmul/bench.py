"""`grouped_matmul` beside `lax.ragged_dot`: `python -m pallas_kernels.grouped_matmul.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.grouped_matmul import grouped_matmul

# experts, rows, K, F, and floors (times faster, times smaller) forward and with gradients
_SHAPES = (
    (64, 4096, 256, 256, (15, 10), (10, 6)),
    (16, 4096, 32, 64, (None, None), (None, None)),
)


def comparisons() -> list[Comparison]:
    """Forward, and with gradients of rows and weights."""
    rows = []
    for experts, num_rows, k_dim, f_dim, forward, backward in _SHAPES:
        make = functools.partial(_make, experts, num_rows, k_dim, f_dim)
        rows += both_ways(
            "grouped_matmul", f"E{experts} M{num_rows} {k_dim}->{f_dim}", "lax.ragged_dot",
            grouped_matmul, jax.lax.ragged_dot, make, argnums=(0, 1), forward=forward,
            backward=backward,
        )  # fmt: skip
    return rows


def _make(experts: int, num_rows: int, k_dim: int, f_dim: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    rows = jax.random.normal(keys[0], (num_rows, k_dim))
    weights = jax.random.normal(keys[1], (experts, k_dim, f_dim))
    ids = jax.random.randint(keys[2], (num_rows,), 0, experts)
    return rows, weights, jnp.bincount(ids, length=experts).astype(jnp.int32)


if __name__ == "__main__":
    print_all(comparisons())
