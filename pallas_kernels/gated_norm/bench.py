"""`gated_norm` beside its reference: `python -m pallas_kernels.gated_norm.bench`."""

import functools

import jax

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.gated_norm import gated_norm, specs

_CASE = specs.Case((1, 2048, 8, 128))


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of x, gate and weight."""
    _, T, N, h = _CASE.shape
    old = functools.partial(_call, impl="ref")
    return both_ways(
        "gated_norm", f"T{T} N{N} h{h}", "reference", _call, old, _make, argnums=(0, 1, 2)
    )


def _call(x: jax.Array, gate: jax.Array, weight: jax.Array, impl: str | None = None) -> jax.Array:
    return gated_norm(x, gate, weight, eps=1e-5, impl=impl)


def _make() -> tuple[jax.Array, ...]:
    inputs = specs.make_inputs(_CASE)
    return inputs["x"], inputs["gate"], inputs["weight"]


if __name__ == "__main__":
    print_all(comparisons())
