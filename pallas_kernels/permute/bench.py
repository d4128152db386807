"""`permute` beside indices and `segment_sum`: `python -m pallas_kernels.permute.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.permute import permute, plan_permute, specs, unpermute

_CASE = specs.Case(num_tokens=2048, num_active=8, num_experts=64, width=256)


def comparisons() -> list[Comparison]:
    """Tokens to rows, and rows to tokens by their weights."""
    c = _CASE
    size, make = f"M{c.num_tokens} A{c.num_active} E{c.num_experts} L{c.width}", _make
    there = both_ways("permute", size, "x[idx]", permute_ours, by_index, make, argnums=(0,))
    make = functools.partial(_make, rows=True)
    back = both_ways(
        "permute", f"{size} back", "segment_sum", unpermute_ours, by_segments, make, argnums=(0, 1)
    )
    return [*there, *back]


def permute_ours(x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Tokens as rows sorted by expert, plan included."""
    return permute(x, plan_permute(ids, _CASE.num_experts))


def by_index(x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """The same by a sort and an index."""
    return x[jnp.argsort(ids.reshape(-1)) // ids.shape[1]]


def unpermute_ours(rows: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Weighted sum of every token's rows, plan included."""
    return unpermute(rows, weights, plan_permute(ids, _CASE.num_experts))


def by_segments(rows: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """The same by a sort and a sum over segments."""
    order = jnp.argsort(ids.reshape(-1))
    scaled = rows * weights.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(scaled, order // ids.shape[1], ids.shape[0])


def _make(rows: bool = False) -> tuple[jax.Array, ...]:
    x, weights, ids = specs.make_inputs(_CASE)
    if rows:
        x = jnp.tile(x, (_CASE.num_active, 1))
    return x, weights, ids


if __name__ == "__main__":
    print_all(comparisons())
