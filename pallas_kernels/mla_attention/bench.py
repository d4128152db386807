"""`mla_attention` beside its reference, which has every score in memory.

python -m pallas_kernels.mla_attention.bench
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.foreign import cudnn_attention
from pallas_kernels.mla_attention import mla_attention, specs

_CASE = specs.Case(1, 1024, 1024, 8, 48, 32)


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of q, k and v; causal, one document."""
    c = _CASE
    size = f"T{c.T} N{c.N} H{c.H} h{c.h}"
    old = functools.partial(_call, impl="ref")
    return both_ways(
        "mla_attention", size, "every score at once", _call, old, _make, argnums=(0, 1, 2),
        forward=(None, 8), backward=(None, 8),
    )  # fmt: skip


def _call(q: jax.Array, k: jax.Array, v: jax.Array, impl: str | None = None) -> jax.Array:
    return mla_attention(q, k, v, scale=q.shape[-1] ** -0.5, impl=impl)[0]


def _make() -> tuple[jax.Array, ...]:
    inputs = _CASE.inputs()
    return tuple(x for x in (inputs["q"], inputs["k"], inputs["v"]) if x is not None)


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3's heads over a causal row, and over the keys that each query chose."""
    T, N, H, h, J = (24, 2, 48, 16, 5) if toy else (8192, 96, 192, 128, 2048)
    pairs = N * T * (T + 1) // 2
    flops = 2 * pairs * (H + h), 2 * pairs * (3 * H + 2 * h)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        shapes = (1, T, N, H), (1, T, N, H), (1, T, N, h)
        return tuple(
            jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
        )

    def make_chosen(key: jax.Array) -> tuple[jax.Array, ...]:
        return *make(key), specs.spread_indices(key, T, T, J)

    def chosen(q: jax.Array, k: jax.Array, v: jax.Array, indices: jax.Array, impl: str):
        return mla_attention(q, k, v, scale=H**-0.5, indices=indices, impl=impl)[0]

    def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return cudnn_attention(q, k, v, scale=H**-0.5, causal=True)

    name = "toy" if toy else "K3"
    return [
        DeviceCase(
            "mla_attention", f"{name} T{T} N{N} H{H} h{h}", make, _call,
            argnums=(0, 1, 2), flops=flops, tolerance=1e-2, others={"cuDNN": cudnn},
            target=">= 1.0 x cuDNN",
        ),
        DeviceCase(
            "mla_attention", f"{name}.1 T{T} N{N} J{J} chosen, masked", make_chosen, chosen,
            argnums=(0, 1, 2), flops=flops, tolerance=1e-2,
            target="forward + backward <= 1.2 x the same without a choice",
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
