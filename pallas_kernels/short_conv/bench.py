"""`short_conv` beside its reference: `python -m pallas_kernels.short_conv.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
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


def device_cases(toy: bool) -> list[DeviceCase]:
    """q, k or v of a K3 layer."""
    B, T, K, X = (1, 40, 4, 32) if toy else (1, 8192, 4, 12_288)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 2)
        return jax.random.normal(keys[0], (B, T, X), jnp.bfloat16), jax.random.normal(
            keys[1], (K, X)
        )

    return [
        DeviceCase(
            "short_conv", f"{'toy' if toy else 'K3'} B{B} T{T} K{K} X{X}", make, _call,
            argnums=(0, 1), flops=(2 * B * T * K * X, 4 * B * T * K * X), tolerance=1e-2,
            target=">= 1.25 x chunked, which is XLA's fusion",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
