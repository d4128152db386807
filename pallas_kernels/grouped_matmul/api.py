"""Public entry of grouped_matmul."""

from typing import Any

from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels import choose
from pallas_kernels.grouped_matmul import activation as activations
from pallas_kernels.grouped_matmul import chunked, ref

_IMPLS = {"chunked": chunked.grouped_matmul, "ref": ref.grouped_matmul}
_ORDER = {"cpu": ("chunked",)}


def grouped_matmul(
    rows: Float[Array, "R K"],
    weights: Shaped[Array, "E _ F"],
    group_sizes: Int[Array, "_"],
    *,
    activation: str | None = None,
    situ_betas: tuple[float, float | None] = (4.0, 25.0),
    scales: Any = None,
    lora: Any = None,
    impl: str | None = None,
) -> Float[Array, "R F2"]:
    """Multiplies each run of rows by the weight of its group.

    The first group_sizes[0] rows belong to group 0, the next group_sizes[1] to group 1, ...:
        out[r] = rows[r] @ weights[group(r)], then the activation, if one is named.
    Rows past the sum of the sizes give exactly 0, whatever they hold, and pass no gradient.
    Products in the input dtype, sums and activation in float32; the backward recomputes
    gate and up.

    Args:
      rows: [R, K], sorted by group.
      weights: [E, K, F]. With an activation, F = 2 * inner: first half gate, second half up.
      group_sizes: int32 [E], at least 0, sum at most R. Empty groups get a zero gradient.
      activation: None, "situ" or "swiglu".
      situ_betas: bounds of gate and up in "situ"; None for the second leaves the up linear.
      scales, lora: must be None.
      impl: None, "chunked" or "ref".
    Returns:
      [R, F], or [R, F / 2] with an activation, in rows' dtype.
    Raises:
      ValueError: shapes disagree, `activation` or `impl` is unknown, F is odd with one.
      NotImplementedError: `scales` or `lora` is given.
    Source: README.md beside this file.
    """
    if scales is not None:
        raise NotImplementedError(
            "scales: multiplying packed MXFP4 weights is not implemented. Unpack them first."
        )
    if lora is not None:
        raise NotImplementedError(
            "lora: low-rank factors are not folded in yet. Add two grouped_matmul calls."
        )
    if weights.shape[0] != group_sizes.shape[0] or weights.shape[1] != rows.shape[1]:
        raise ValueError(
            f"rows {rows.shape}, weights {weights.shape}, sizes {group_sizes.shape} disagree. "
            "Give [R, K], [E, K, F] and [E]."
        )
    if activation is not None and activation not in activations.NAMES:
        raise ValueError(
            f"activation={activation!r} is unknown. Use None, {', '.join(activations.NAMES)}."
        )
    if activation is not None and weights.shape[2] % 2:
        raise ValueError(
            f"weights have {weights.shape[2]} columns, which do not halve into gate and up. "
            "Give 2 * inner columns."
        )
    names = choose.candidates(_IMPLS, _ORDER, impl)
    options = {"activation": activation, "situ_betas": situ_betas}
    return choose.first_that_runs(_IMPLS, names, rows, weights, group_sizes, **options)
