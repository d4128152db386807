"""Named cases of sparse_flash_attention, tolerances, and what a case costs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gate_case import GateCase

# Relative RMS error against ref.py in float32 arithmetic, outputs and gradients alike.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes. Queries are the last T of S positions; `empty` of them choose no key."""

    B: int
    T: int
    S: int
    N: int
    C: int
    R: int
    J: int
    empty: int = 0

    def indices(self, seed: int = 0) -> jax.Array:
        """Distinct keys of the past in random order, -1 where there are fewer than J."""
        rng = np.random.default_rng(seed)
        indices = np.full((self.B, self.T, self.J), -1, np.int32)
        for b in range(self.B):
            for t in range(self.T - self.empty):
                keys = rng.permutation(self.S - self.T + t + 1)[: self.J]
                indices[b, t, : len(keys)] = keys
        return jnp.asarray(indices)

    def inputs(self, dtype=jnp.float32, seed: int = 0) -> dict[str, jax.Array]:
        """Normal queries and rows, and the chosen indices."""
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = {
            "q_latent": (self.B, self.T, self.N, self.C),
            "q_rope": (self.B, self.T, self.N, self.R),
            "latent": (self.B, self.S, self.C),
            "k_rope": (self.B, self.S, self.R),
        }
        arrays = {
            name: jax.random.normal(key, shape).astype(dtype)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return arrays | {"indices": self.indices(seed)}

    def options(self) -> dict:
        """Keyword options."""
        return {"scale": (self.C + self.R) ** -0.5}

    def flops(self) -> int:
        """Forward multiply-adds times two over J keys a query."""
        return 2 * self.B * self.T * self.J * self.N * (2 * self.C + self.R)


CASES = {
    "one": Case(2, 1, 1, 2, 8, 4, 1),
    "odd63": Case(2, 63, 63, 3, 8, 4, 7, empty=2),
    "odd65": Case(2, 65, 65, 2, 6, 2, 16),
    "one_key": Case(2, 65, 65, 2, 8, 4, 1),
    "more_than_all": Case(1, 63, 63, 2, 8, 4, 80),
    "three_blocks": Case(1, 170, 170, 2, 8, 4, 9, empty=1),
    "later_queries": Case(1, 33, 150, 2, 8, 4, 8),
}
LARGE = Case(1, 1024, 1024, 8, 64, 16, 128)
# Widths that a matrix unit takes; slots of one, two and three tiles of a kernel.
KERNEL_CASES = {
    "one": Case(2, 1, 1, 1, 16, 16, 1),
    "more_than_all": Case(1, 6, 6, 3, 16, 16, 65, empty=1),
    "heads": Case(1, 5, 70, 70, 16, 16, 40, empty=1),
    "later_queries": Case(2, 3, 300, 18, 32, 16, 129),
}


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3.1's and DeepSeek-V3.2's heads, 8 K queries of 8 K to 128 K keys.

    A TPU has no kernel of it: what runs there past the crossover is XLA's gather.
    """
    names = ("", "_ds", "_grad") if platform == "gpu" else ()
    kernels = tuple(f"sparse_flash_attention{name}" for name in names)
    return [
        GateCase(
            f"sparse_flash_attention {way} {model} {keys // 1024} K", function(platform, backward),
            shapes(8192, keys, heads, backward), kernels if backward else kernels[:1],
            quick=keys == 8192 and heads == 96 and platform == "gpu",
            xla=platform == "tpu",
        )
        for model, heads in (("K3.1", 96), ("DeepSeek-V3.2", 128))
        for keys in (8192, 32768, 131072)
        for way, backward in (("forward", False), ("backward", True))
    ]  # fmt: skip


def shapes(queries: int, keys: int, heads: int, backward: bool = False):
    """q_latent, q_rope, latent, k_rope, indices, and with `backward` cotangents."""
    low = lambda *shape: jax.ShapeDtypeStruct((1, *shape), jnp.bfloat16)  # noqa: E731
    inputs = (
        low(queries, heads, 512), low(queries, heads, 64), low(keys, 512), low(keys, 64),
        jax.ShapeDtypeStruct((1, queries, 2048), jnp.int32),
    )  # fmt: skip
    if not backward:
        return inputs
    wide = jax.ShapeDtypeStruct((1, queries, heads, 512), jnp.float32)
    return *inputs, wide, jax.ShapeDtypeStruct((1, queries, heads), jnp.float32)


def function(platform: str, backward: bool) -> Callable[..., Any]:
    """Output and lse, or the gradients, of what `shapes` lists."""
    # which imports kernels
    from pallas_kernels.sparse_flash_attention import sparse_flash_attention

    impl = "chunked" if platform == "tpu" else f"pallas_{platform}"

    def forward(*inputs):
        return sparse_flash_attention(*inputs, scale=192**-0.5, impl=impl)

    def gradients(*args):
        *inputs, indices, dout, dlse = args
        run = lambda *inputs: forward(*inputs, indices)  # noqa: E731
        return jax.vjp(run, *inputs)[1]((dout, dlse))

    return gradients if backward else forward
