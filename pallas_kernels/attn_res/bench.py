"""`attn_res` beside its reference: `python -m pallas_kernels.attn_res.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.attn_res import attn_res, specs
from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase

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


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3's mix of nine sources."""
    X, T, D = (3, 24, 64) if toy else (9, 8192, 7168)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        query, norm = (jax.random.normal(k, (D,)) for k in keys[:2])
        return query * D**-0.5, norm, jax.random.normal(keys[2], (X, 1, T, D), jnp.bfloat16)

    return [
        DeviceCase(
            "attn_res", f"{'toy' if toy else 'K3'} X{X} T{T} D{D}", make, _call,
            argnums=(0, 1, 2), flops=(6 * X * T * D, 12 * X * T * D), tolerance=1e-2,
            target=">= 1.25 x chunked, which is XLA's fusion",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
