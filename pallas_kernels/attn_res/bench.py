"""`attn_res` beside its reference: `python -m pallas_kernels.attn_res.bench`."""

import functools

import jax

from pallas_kernels.attn_res import attn_res, specs
from pallas_kernels.benching.comparison import Comparison, both_ways, print_all

_CASE = specs.Case(num_sources=9, used=9, batch=1, length=1024, width=512)


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of query, norm and sources."""
    c = _CASE
    old = functools.partial(_call, impl="ref")
    size = f"X{c.num_sources} T{c.length} D{c.width}"
    make = functools.partial(specs.make_inputs, c)
    return both_ways("attn_res", size, "reference", _call, old, make, argnums=(0, 1, 2))


def _call(
    query: jax.Array, norm_weight: jax.Array, sources: jax.Array, impl: str | None = None
) -> jax.Array:
    return attn_res(query, norm_weight, sources, eps=1e-5, impl=impl)


if __name__ == "__main__":
    print_all(comparisons())
