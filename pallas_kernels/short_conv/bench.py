"""`short_conv` beside its reference: `python -m pallas_kernels.short_conv.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.short_conv import short_conv, specs

_CASE = specs.Case(2, 1024, 4, 512)


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of inputs and taps."""
    c = _CASE
    old = functools.partial(_call, impl="ref")
    size = f"B{c.B} T{c.T} K{c.K} X{c.X}"
    return both_ways("short_conv", size, "reference", _call, old, _make, argnums=(0, 1))


def _call(x: jax.Array, taps: jax.Array, impl: str | None = None) -> jax.Array:
    return short_conv(x, taps, impl=impl)[0]


def _make() -> tuple[jax.Array, ...]:
    inputs = specs.make_inputs(_CASE)
    return tuple(jnp.asarray(inputs[name]) for name in ("x", "taps"))


if __name__ == "__main__":
    print_all(comparisons())
