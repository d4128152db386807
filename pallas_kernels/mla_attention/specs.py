"""Named cases of mla_attention, tolerances, and what a case costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

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
