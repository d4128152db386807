"""Public entry of permute and unpermute."""

from jaxtyping import Array, Float

from pallas_kernels import choose
from pallas_kernels.checks import check_arrays, check_float, check_rank
from pallas_kernels.permute import chunked, pallas_gpu, ref
from pallas_kernels.permute.plan import PermutePlan

_PERMUTE = {"pallas_gpu": pallas_gpu.permute, "chunked": chunked.permute, "ref": ref.permute}
_UNPERMUTE = {
    "pallas_gpu": pallas_gpu.unpermute,
    "chunked": chunked.unpermute,
    "ref": ref.unpermute,
}
_ORDER = {"gpu": ("pallas_gpu", "chunked"), "cpu": ("chunked",)}


def permute(
    x: Float[Array, "M L"], plan: PermutePlan, *, impl: str | None = None
) -> Float[Array, "R L"]:
    """Copies tokens into rows sorted by expert: rows[r] = x[order[r] // A].

    Rows behind the last group (assignments to no expert) are 0 and pass no gradient. Forward and
    backward are gathers; the gradient of a token sums its A rows in float32.

    Args:
      x: [M, L], any floating dtype.
      plan: from `plan_permute` of the same M tokens.
      impl: None, "pallas_gpu", "chunked" or "ref".
    Returns:
      [M*A, L] in x's dtype.
    Raises:
      ValueError: x is no floating [M, L] of the plan's tokens, or `impl` is unknown.
    """
    _check_plan(plan)
    check_rank("x", x, "M L")
    check_arrays(x=x)
    check_float(x=x)
    if x.shape[0] != plan.positions.shape[0]:
        raise ValueError(
            f"x has {x.shape[0]} tokens, the plan {plan.positions.shape[0]}. "
            "Use the plan made from the same tokens' expert ids."
        )
    names = choose.candidates(_PERMUTE, _ORDER, impl)
    return choose.first_that_runs(_PERMUTE, names, x, plan)


def unpermute(
    rows: Float[Array, "R L"],
    weights: Float[Array, "M A"],
    plan: PermutePlan,
    *,
    impl: str | None = None,
) -> Float[Array, "M L"]:
    """Weighted combine: out[m] = sum over a of weights[m, a] * rows[positions[m, a]].

    Summed in float32 and rounded once. Assignments to no expert count 0, whatever their row holds.
    Differentiable in rows and weights; the gradient of a weight is the dot of its row with that of
    the output.

    Args:
      rows: [M*A, L] in the order of the plan.
      weights: [M, A], float32 as the router gives them.
      plan: from `plan_permute`.
      impl: None, "pallas_gpu", "chunked" or "ref".
    Returns:
      [M, L] in rows' dtype.
    Raises:
      ValueError: shapes disagree with the plan, a dtype is not floating, or `impl` is unknown.
    """
    _check_plan(plan)
    check_rank("rows", rows, "R L")
    check_rank("weights", weights, "M A")
    check_arrays(rows=rows, weights=weights)
    check_float(rows=rows, weights=weights)
    if rows.shape[0] != plan.order.shape[0] or weights.shape != plan.positions.shape:
        raise ValueError(
            f"rows {rows.shape} and weights {weights.shape} do not fit a plan of "
            f"{plan.positions.shape} assignments. Give [M*A, L] rows and [M, A] weights."
        )
    names = choose.candidates(_UNPERMUTE, _ORDER, impl)
    return choose.first_that_runs(_UNPERMUTE, names, rows, weights, plan)


def _check_plan(plan) -> None:
    if not isinstance(plan, PermutePlan):
        raise ValueError(f"plan is a {type(plan).__name__}; give what plan_permute returns.")
