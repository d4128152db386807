"""`gated_norm` beside its reference: `python -m pallas_kernels.gated_norm.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
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


def device_cases(toy: bool) -> list[DeviceCase]:
    """The output norm of a K3 layer."""
    T, N, h = (24, 2, 32) if toy else (8192, 96, 128)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x, gate = (jax.random.normal(k, (1, T, N, h), jnp.bfloat16) for k in keys[:2])
        return x, gate, 1 + 0.1 * jax.random.normal(keys[2], (h,))

    return [
        DeviceCase(
            "gated_norm", f"{'toy' if toy else 'K3'} T{T} N{N} h{h}", make, _call,
            argnums=(0, 1, 2), flops=(8 * T * N * h, 20 * T * N * h), tolerance=1e-2,
            target=">= 1.25 x chunked, which is XLA's fusion",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
