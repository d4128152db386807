"""Named cases of mla_attention, tolerances, and what a case costs."""

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
    """Sizes, and where documents begin (0 always does); `padding` positions close each row."""

    B: int
    T: int
    S: int
    N: int
    H: int
    h: int
    starts: tuple[int, ...] = ()
    padding: int = 0
    causal: bool = True

    def inputs(self, dtype=jnp.float32, seed: int = 0) -> dict[str, jax.Array | None]:
        """Normal q, k, v; segment ids where the case has documents."""
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = {
            "q": (self.B, self.T, self.N, self.H),
            "k": (self.B, self.S, self.N, self.H),
            "v": (self.B, self.S, self.N, self.h),
        }
        arrays: dict[str, jax.Array | None] = {
            name: jax.random.normal(key, shape).astype(dtype)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        arrays["segment_ids"] = None
        if self.starts or self.padding:
            arrays["segment_ids"] = segments(self.B, self.T, self.starts, self.padding)
        return arrays

    def options(self) -> dict:
        """Keyword options: queries are the last T of S positions."""
        return {"scale": self.H**-0.5, "causal": self.causal, "q_offset": self.S - self.T}

    def flops(self) -> int:
        """Forward multiply-adds times two over visible pairs, documents not counted."""
        pairs = self.T * self.S - (self.T * (self.T - 1) // 2 if self.causal else 0)
        return 2 * self.B * self.N * pairs * (self.H + self.h)


def segments(batch: int, length: int, starts: tuple[int, ...], padding: int = 0) -> jax.Array:
    """Segment ids [batch, length]: a new document at each start, zeros at the end."""
    row = 1 + np.searchsorted(np.asarray(starts, int), np.arange(length), side="right")
    row[length - padding :] = 0
    return jnp.asarray(np.tile(row, (batch, 1)), jnp.int32)


CASES = {
    "one": Case(2, 1, 1, 2, 8, 5),
    "odd63": Case(2, 63, 63, 2, 8, 5),
    "odd65_packed": Case(2, 65, 65, 3, 6, 4, starts=(1, 33), padding=7),
    "two_blocks": Case(1, 300, 300, 2, 8, 8, starts=(150, 260), padding=3),
    "later_queries": Case(1, 33, 290, 2, 8, 4),
    "both_ways": Case(2, 65, 65, 2, 8, 4, starts=(20,), causal=False),
}
LARGE = Case(1, 1024, 1024, 4, 16, 16)
# Widths that a matrix unit takes, lengths of one, two and three tiles of a kernel.
KERNEL_CASES = {
    "one": Case(2, 1, 1, 2, 16, 16),
    "odd63": Case(1, 63, 63, 2, 48, 16),
    "even64_both_ways": Case(1, 64, 64, 2, 16, 16, starts=(20,), causal=False),
    "odd65_packed": Case(2, 65, 65, 2, 48, 32, starts=(1, 2, 33), padding=7),
    "three_tiles": Case(1, 257, 257, 1, 16, 16, starts=(150,), padding=3),
    "later_queries": Case(1, 33, 290, 1, 16, 16),
}


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3's and DeepSeek-V3.2's heads, 8 K, 32 K and 128 K keys."""
    kernels = ("mla_attention", "mla_attention_dq", "mla_attention_dkv")
    return [
        GateCase(
            f"mla_attention {way} {model} {length // 1024} K", function(platform, backward),
            shapes(length, heads, backward), kernels if backward else kernels[:1],
            quick=length == 8192 and heads == 96,
        )
        for length, model, heads in (
            (8192, "K3", 96), (32768, "K3", 96), (131072, "K3", 96),
            (8192, "DeepSeek-V3.2", 128), (32768, "DeepSeek-V3.2", 128),
            (131072, "DeepSeek-V3.2", 128),
        )
        for way, backward in (("forward", False), ("backward", True))
    ]  # fmt: skip


def shapes(length: int, heads: int, backward: bool = False) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, segment ids, and with `backward` cotangents, of as many queries as keys."""
    tensor = lambda width: jax.ShapeDtypeStruct((1, length, heads, width), jnp.bfloat16)  # noqa: E731
    inputs = (tensor(192), tensor(192), tensor(128), jax.ShapeDtypeStruct((1, length), jnp.int32))
    if not backward:
        return inputs
    wide = jax.ShapeDtypeStruct((1, length, heads, 128), jnp.float32)
    return *inputs, wide, jax.ShapeDtypeStruct((1, length, heads), jnp.float32)


def function(platform: str, backward: bool) -> Callable[..., Any]:
    """Output and lse, or the gradients, of what `shapes` lists."""
    from pallas_kernels.mla_attention import mla_attention  # which imports kernels

    def forward(q, k, v, segment_ids):
        return mla_attention(
            q, k, v, scale=192**-0.5, segment_ids=segment_ids, impl=f"pallas_{platform}"
        )

    def gradients(q, k, v, segment_ids, *cotangents):
        run = lambda q, k, v: forward(q, k, v, segment_ids)  # noqa: E731
        return jax.vjp(run, q, k, v)[1](cotangents)

    return gradients if backward else forward
