"""Where each (token, expert) assignment goes when rows are sorted by expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.checks import check_arrays, check_int, check_rank, is_int

# Assignments are ranked in blocks by comparing all pairs of a block: R * 128 comparisons in all,
# whatever the number of experts (a one-hot prefix sum would need R * E integers).
_BLOCK = 128


class PermutePlan(NamedTuple):
    """A stable sort of M*A assignments by expert, and its inverse.

    order: sorted row -> flat assignment m*A + a.
    positions: assignment (m, a) -> sorted row.
    group_sizes: rows of each expert; what is past their sum belongs to no expert.
    """

    order: Int32[Array, " R"]
    positions: Int32[Array, "M A"]
    group_sizes: Int32[Array, " E"]


def plan_permute(expert_ids: Int[Array, "M A"], num_experts: int) -> PermutePlan:
    """Counting sort of assignments by expert, stable and without a comparison sort.

    The row of an assignment is the number of assignments to lower experts, plus those to its own
    expert in earlier blocks, plus those earlier in its block.

    Args:
      expert_ids: integers [M, A]. Values outside [0, num_experts), such as num_experts itself, mean
        "no expert": they sort behind every group and are not counted.
      num_experts: E, static, at least 1.
    Returns:
      PermutePlan with int32 fields; all sizes are static.
    Raises:
      ValueError: `num_experts` is no integer from 1, or `expert_ids` no integers [M, A].
    """
    check_rank("expert_ids", expert_ids, "M A")
    check_arrays(expert_ids=expert_ids)
    check_int(expert_ids=expert_ids)
    if not is_int(num_experts):
        raise ValueError(f"num_experts={num_experts!r} is no integer. Give the number of groups.")
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} is below 1. Give the number of expert groups.")
    num_rows, shape = expert_ids.size, expert_ids.shape
    ids_R = expert_ids.reshape(-1).astype(jnp.int32)
    ids_R = jnp.where((ids_R < 0) | (ids_R > num_experts), num_experts, ids_R)
    block = min(_BLOCK, max(num_rows, 1))
    num_blocks = -(-num_rows // block)
    # One more bin than "no expert", so that the filling of the last block sorts behind everything.
    filled = jnp.pad(ids_R, (0, num_blocks * block - num_rows), constant_values=num_experts + 1)
    ids_Gc = filled.reshape(num_blocks, block)

    same_Gcc = ids_Gc[:, :, None] == ids_Gc[:, None, :]
    earlier_cc = jnp.tril(jnp.ones((block, block), bool), -1)
    rank_Gc = jnp.sum(same_Gcc & earlier_cc, axis=-1, dtype=jnp.int32)

    blocks_G1 = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    counts_GE = jnp.zeros((num_blocks, num_experts + 2), jnp.int32).at[blocks_G1, ids_Gc].add(1)
    sizes_E = jnp.sum(counts_GE, axis=0, dtype=jnp.int32)
    starts_E = jnp.cumsum(sizes_E, dtype=jnp.int32) - sizes_E
    before_GE = jnp.cumsum(counts_GE, axis=0, dtype=jnp.int32) - counts_GE + starts_E

    positions_Gc = jnp.take_along_axis(before_GE, ids_Gc, axis=1) + rank_Gc
    positions_R = positions_Gc.reshape(-1)[:num_rows]
    order_R = (
        jnp.zeros((num_rows,), jnp.int32)
        .at[positions_R]
        .set(jnp.arange(num_rows, dtype=jnp.int32), unique_indices=True)
    )
    return PermutePlan(order_R, positions_R.reshape(shape), sizes_E[:num_experts])
