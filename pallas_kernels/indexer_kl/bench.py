"""`indexer_kl` beside its reference, which has both distributions over all keys in memory.

python -m pallas_kernels.indexer_kl.bench
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.indexer_kl import indexer_kl, specs
from pallas_kernels.mla_attention.specs import spread_indices

_NAMES = ("q_idx", "k_idx", "w_idx", "q_latent", "q_rope", "latent", "k_rope", "lse")
_SPARSE = specs.Case(1, 1024, 4, 32, 16, 8, 32, 128)
_DENSE = specs.Case(1, 1024, 4, 32, 16, 8, 32, None)


def comparisons() -> list[Comparison]:
    """Both stages: forward, and with the gradients of the indexer."""
    rows = []
    for case, stage in ((_SPARSE, "sparse"), (_DENSE, "dense")):
        size = f"{stage} T{case.T} N{case.N} U{case.U}" + (f" J{case.J}" if case.J else "")
        rows += both_ways(
            "indexer_kl", size, "all keys at once", _call, functools.partial(_call, impl="ref"),
            functools.partial(_make, case), argnums=(0, 1, 2), forward=(None, 4),
            backward=(None, 4),
        )  # fmt: skip
    return rows


def _call(*args: jax.Array, impl: str | None = None, scale: float = 0.1) -> jax.Array:
    named = dict(zip((*_NAMES, "indices"), args, strict=False))
    return indexer_kl(**named, scale=scale, impl=impl)


def _make(case: specs.Case) -> tuple[jax.Array, ...]:
    x = specs.with_sets(case, case.inputs())
    return tuple(x[name] for name in (*_NAMES, *(["indices"] if case.J else [])))


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3.1's indexer: the sparse stage over 32 K keys, the dense one over a row of 8 K."""
    return [_device_case(toy, True), _device_case(toy, False)]


def _device_case(toy: bool, sparse: bool) -> DeviceCase:
    T, N, C, R, U, u, J = (8, 2, 16, 16, 2, 16, 6) if toy else (8192, 96, 512, 64, 32, 128, 2048)
    S = T if not sparse else 4 * T

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        shapes = ((T, U, u), (S, u), (T, U), (T, N, C), (T, N, R), (S, C), (S, R))
        keys = jax.random.split(key, len(shapes))
        low = [
            jax.random.normal(k, (1, *s), jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)
        ]
        # p is divided by its sum: any lse of about the right size will do
        lse = jnp.full((1, T, N), jnp.log(S / 2.0) + 1)
        chosen = [spread_indices(key, T, S, J)] if sparse else []
        return *low[:2], low[2].astype(jnp.float32), *low[3:], lse, *chosen

    pairs = T * J if sparse else T * (T + 1) // 2
    forward = 2 * pairs * (N * (C + R) + U * u)
    stage = f"sparse T{T} S{S} J{J}" if sparse else f"dense T{T}"
    return DeviceCase(
        "indexer_kl", f"{'toy' if toy else 'K3.1'} {stage} N{N} U{U}", make,
        functools.partial(_call, scale=(C + R) ** -0.5), argnums=(0, 1, 2),
        flops=(forward, forward + 4 * pairs * U * u), tolerance=1e-2,
        target=">= 2 x chunked, which is the form of small operators",
    )  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
