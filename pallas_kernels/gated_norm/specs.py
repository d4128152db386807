"""Cases that tests and benchmarks of `gated_norm` share, and their tolerances."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase
from pallas_kernels.gated_norm.api import gated_norm


@dataclass(frozen=True)
class Case:
    """One size; `size` scales x, so that eps does and does not matter."""

    shape: tuple[int, ...]
    eps: float = 1e-5
    size: float = 1.0
    dtype: str = "float32"


# relative root mean square against float32
TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3}

CASES = {
    "vector": Case((8,)),
    "odd": Case((1, 63, 2, 17)),
    "heads": Case((2, 65, 4, 16)),
    "small_values": Case((2, 5, 16), size=1e-3),
    "large_values": Case((2, 5, 16), size=1e6, eps=1e-6),
    "low_precision": Case((2, 65, 4, 16), dtype="bfloat16"),
}


def make_inputs(case: Case, seed: int = 0) -> dict[str, jax.Array]:
    """Arguments of `gated_norm` by name."""
    keys = jax.random.split(jax.random.key(seed), 3)
    dtype = jnp.dtype(case.dtype)
    return {
        "x": (case.size * jax.random.normal(keys[0], case.shape)).astype(dtype),
        "gate": jax.random.normal(keys[1], case.shape).astype(dtype),
        "weight": 1 + 0.1 * jax.random.normal(keys[2], case.shape[-1:]),
    }


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: the outputs of K3's 96 and Kimi-Linear's 32 heads, with gradients."""

    def both_ways(x, gate, weight, dy):
        norm = lambda *a: gated_norm(*a, eps=1e-5, impl=f"pallas_{platform}")  # noqa: E731
        y, pullback = jax.vjp(norm, x, gate, weight)
        return y, pullback(dy)

    cases = []
    for model, heads in (("K3", 96), ("Kimi-Linear", 32)):
        x = jax.ShapeDtypeStruct((1, 8192, heads, 128), jnp.bfloat16)
        weight = jax.ShapeDtypeStruct((128,), jnp.float32)
        # a function of its own for each, as JAX remembers traces
        fn = lambda *a, fn=both_ways: fn(*a)  # noqa: E731
        cases.append(GateCase(f"gated_norm {model}", fn, (x, x, weight, x), quick=heads == 96))
    return cases
