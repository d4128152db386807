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
    """Sizes, and where documents begin (0 always does); `padding` positions close each row.

    With `J` each query chooses J keys, some of which it cannot see.
    """

    B: int
    T: int
    S: int
    N: int
    H: int
    h: int
    starts: tuple[int, ...] = ()
    padding: int = 0
    causal: bool = True
    J: int = 0

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
        if self.J:
            draws = jax.random.uniform(jax.random.key(seed + 1), (self.B, self.T, self.S))
            indices = jnp.argsort(draws, axis=2)[..., : self.J].astype(jnp.int32)
            arrays["indices"] = indices.at[:, :, 1].set(-1)
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


def spread_indices(key: jax.Array, queries: int, keys: int, top_k: int) -> jax.Array:
    """int32 [1, queries, top_k]: distinct visible keys of the last queries, one from each stretch.

    A query that sees fewer than `top_k` has empty slots, -1.
    """
    visible_T1 = keys - queries + 1 + jnp.arange(queries, dtype=jnp.int32)[:, None]
    stretch_T1 = jnp.maximum(visible_T1 // top_k, 1)
    draw_TJ = jax.random.uniform(key, (queries, top_k))
    step_J = jnp.arange(top_k, dtype=jnp.int32)
    found_TJ = step_J * stretch_T1 + (draw_TJ * stretch_T1).astype(jnp.int32)
    return jnp.where(found_TJ < visible_T1, found_TJ, -1)[None]


CASES = {
    "one": Case(2, 1, 1, 2, 8, 5),
    "odd63": Case(2, 63, 63, 2, 8, 5),
    "odd65_packed": Case(2, 65, 65, 3, 6, 4, starts=(1, 33), padding=7),
    "two_blocks": Case(1, 300, 300, 2, 8, 8, starts=(150, 260), padding=3),
    "later_queries": Case(1, 33, 290, 2, 8, 4),
    "chosen": Case(2, 300, 300, 2, 8, 4, starts=(150,), padding=3, J=40),
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
    "chosen": Case(2, 70, 70, 1, 16, 16, starts=(33,), padding=2, J=9),
}


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: K3's and DeepSeek-V3.2's heads, 8 K to 128 K keys, and a choice of them.

    Half of 128 K positions are queries: those of one device of two along the sequence.
    """
    kernels = ("mla_attention", "mla_attention_dq", "mla_attention_dkv")
    return [
        GateCase(
            f"mla_attention {way} {model} {keys // 1024} K", function(platform, backward),
            shapes(min(keys, 65536), keys, heads, top_k, backward),
            kernels if backward else kernels[:1], quick=keys == 8192 and heads == 96 and not top_k,
        )
        for model, heads, keys, top_k in (
            ("K3", 96, 8192, 0), ("K3", 96, 32768, 0), ("K3", 96, 131072, 0),
            ("K3.1 chosen keys", 96, 8192, 2048), ("K3.1 chosen keys", 96, 32768, 2048),
            ("K3.1 chosen keys", 96, 131072, 2048),
            ("DeepSeek-V3.2", 128, 8192, 0), ("DeepSeek-V3.2", 128, 32768, 0),
            ("DeepSeek-V3.2", 128, 131072, 0), ("DeepSeek-V3.2 chosen keys", 128, 8192, 2048),
            ("DeepSeek-V3.2 chosen keys", 128, 32768, 2048),
            ("DeepSeek-V3.2 chosen keys", 128, 131072, 2048),
        )
        for way, backward in (("forward", False), ("backward", True))
    ]  # fmt: skip


def shapes(
    queries: int, keys: int, heads: int, top_k: int = 0, backward: bool = False
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """q, k, v, segment ids of both, with `top_k` indices, with `backward` cotangents."""
    low = lambda *dims: jax.ShapeDtypeStruct((1, *dims), jnp.bfloat16)  # noqa: E731
    whole = lambda *dims: jax.ShapeDtypeStruct((1, *dims), jnp.int32)  # noqa: E731
    inputs = (
        low(queries, heads, 192), low(keys, heads, 192), low(keys, heads, 128),
        whole(queries), whole(keys), *([whole(queries, top_k)] if top_k else []),
    )  # fmt: skip
    if not backward:
        return inputs
    wide = jax.ShapeDtypeStruct((1, queries, heads, 128), jnp.float32)
    return *inputs, wide, jax.ShapeDtypeStruct((1, queries, heads), jnp.float32)


def function(platform: str, backward: bool) -> Callable[..., Any]:
    """Output and lse, or the gradients, of what `shapes` lists."""
    from pallas_kernels.mla_attention import mla_attention  # which imports kernels

    def forward(q, k, v, seg_q, seg_k, indices=None):
        return mla_attention(
            q, k, v, scale=192**-0.5, segment_ids=seg_q, kv_segment_ids=seg_k, indices=indices,
            q_offset=k.shape[1] - q.shape[1], impl=f"pallas_{platform}",
        )  # fmt: skip

    def gradients(q, k, v, *args):
        run = lambda q, k, v: forward(q, k, v, *args[:-2])  # noqa: E731
        return jax.vjp(run, q, k, v)[1](args[-2:])

    return gradients if backward else forward
