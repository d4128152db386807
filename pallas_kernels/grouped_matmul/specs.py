"""Named cases of grouped_matmul."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import mxfp4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes of one case; rows past the sum of `group_sizes` belong to no group.

    Attributes:
      packed: weights are MXFP4.
      rank: of the adapters, 0 for none; with `shared_a` all groups have the same first one.
    """

    num_rows: int
    k_dim: int
    f_dim: int
    group_sizes: tuple[int, ...]
    activation: str | None = None
    dtype: str = "float32"
    packed: bool = False
    rank: int = 0
    shared_a: bool = False

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
    "lora": Case(num_rows=70, k_dim=5, f_dim=7, group_sizes=(10, 0, 40, 13), rank=3),
    "packed_situ_lora": Case(
        num_rows=150, k_dim=32, f_dim=12, group_sizes=(30, 0, 65, 40), activation="situ",
        packed=True, rank=2,
    ),
    "packed_swiglu_shared_a": Case(
        num_rows=150, k_dim=32, f_dim=12, group_sizes=(30, 0, 65, 40), activation="swiglu",
        packed=True, rank=4, shared_a=True,
    ),
    "bfloat16_packed_lora": Case(
        num_rows=130, k_dim=32, f_dim=16, group_sizes=(64, 3, 63), dtype="bfloat16", packed=True,
        rank=8, shared_a=True,
    ),
}  # fmt: skip

# relative root mean square against the reference in float32
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


def make_inputs(case: Case, seed: int = 0, tail: float = 0.0):
    """rows, weights, group_sizes; rows that no group owns hold `tail`. Nothing is packed."""
    keys = jax.random.split(jax.random.key(seed), 2)
    rows = jax.random.normal(keys[0], (case.num_rows, case.k_dim)).astype(case.dtype)
    rows = rows.at[sum(case.group_sizes) :].set(tail)
    shape = (len(case.group_sizes), case.k_dim, case.f_dim)
    weights = (jax.random.normal(keys[1], shape) * case.k_dim**-0.5).astype(case.dtype)
    return rows, weights, jnp.asarray(case.group_sizes, jnp.int32)


def make_all(case: Case, seed: int = 0) -> dict:
    """Arguments by name: rows, weights (and scales, if packed), group_sizes, adapters a and b."""
    rows, weights, sizes = make_inputs(case, seed)
    out = {"rows": rows, "weights": weights, "group_sizes": sizes}
    if case.packed:
        out["weights"], out["scales"] = mxfp4.encode(weights)
    if case.rank:
        keys = jax.random.split(jax.random.key(seed + 1), 2)
        num_groups, k_dim, f_dim = weights.shape
        a_shape = (k_dim, case.rank) if case.shared_a else (num_groups, k_dim, case.rank)
        out["a"] = (jax.random.normal(keys[0], a_shape) * k_dim**-0.5).astype(case.dtype)
        b_shape = (num_groups, case.rank, f_dim)
        out["b"] = (jax.random.normal(keys[1], b_shape)).astype(case.dtype)
    return out
