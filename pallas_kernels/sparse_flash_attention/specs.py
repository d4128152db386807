"""Named cases of sparse_flash_attention, tolerances, and what a case costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

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
