"""Named cases of grouped_matmul."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one case; rows past the sum of `group_sizes` belong to no group."""

    num_rows: int
    k_dim: int
    f_dim: int
    group_sizes: tuple[int, ...]
    activation: str | None = None
    dtype: str = "float32"

    @property
    def flops(self) -> int:
        """Multiply-adds of the forward, times two."""
        return 2 * sum(self.group_sizes) * self.k_dim * self.f_dim


CASES = {
    "one_row": Case(num_rows=1, k_dim=3, f_dim=5, group_sizes=(1,)),
    "odd": Case(num_rows=63, k_dim=5, f_dim=7, group_sizes=(10, 0, 40, 13)),
    "large_odd": Case(num_rows=1000, k_dim=16, f_dim=24, group_sizes=(1, 63, 700, 0, 236)),
    "all_to_one": Case(num_rows=200, k_dim=8, f_dim=8, group_sizes=(0, 0, 200, 0)),
    "nothing": Case(num_rows=20, k_dim=4, f_dim=6, group_sizes=(0, 0, 0)),
    "tail": Case(num_rows=150, k_dim=8, f_dim=12, group_sizes=(30, 0, 65, 2, 0)),
    "more_groups_than_rows": Case(num_rows=5, k_dim=4, f_dim=4, group_sizes=(1, 0, 2, 0, 1, 0, 1)),
    "situ": Case(num_rows=130, k_dim=8, f_dim=24, group_sizes=(64, 3, 0, 40), activation="situ"),
    "swiglu": Case(num_rows=65, k_dim=8, f_dim=10, group_sizes=(20, 45), activation="swiglu"),
    "bfloat16": Case(num_rows=130, k_dim=32, f_dim=16, group_sizes=(64, 3, 63), dtype="bfloat16"),
    "bfloat16_situ": Case(
        num_rows=65, k_dim=32, f_dim=16, group_sizes=(33, 30), activation="situ", dtype="bfloat16"
    ),
}

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


def make_inputs(case: Case, seed: int = 0, tail: float = 0.0):
    """rows, weights, group_sizes; rows that no group owns hold `tail`."""
    keys = jax.random.split(jax.random.key(seed), 2)
    rows = jax.random.normal(keys[0], (case.num_rows, case.k_dim)).astype(case.dtype)
    rows = rows.at[sum(case.group_sizes) :].set(tail)
    shape = (len(case.group_sizes), case.k_dim, case.f_dim)
    weights = (jax.random.normal(keys[1], shape) * case.k_dim**-0.5).astype(case.dtype)
    return rows, weights, jnp.asarray(case.group_sizes, jnp.int32)
