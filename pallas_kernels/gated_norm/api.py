"""Gated RMSNorm: the public function, its checks and the choice of implementation."""

from jaxtyping import Array, Float

from pallas_kernels import choose
from pallas_kernels.checks import check_arrays, check_float, check_number
from pallas_kernels.gated_norm import chunked, pallas_gpu, pallas_tpu, ref

_IMPLS = {
    "pallas_gpu": pallas_gpu.gated_norm,
    "pallas_tpu": pallas_tpu.gated_norm,
    "chunked": chunked.gated_norm,
    "ref": ref.gated_norm,
}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"),
    "tpu": ("pallas_tpu", "chunked"),
    "cpu": ("chunked",),
}


def gated_norm(
    x: Float[Array, "*batch h"],
    gate: Float[Array, "*batch h"],
    weight: Float[Array, " h"],
    *,
    eps: float,
    impl: str | None = None,
) -> Float[Array, "*batch h"]:
    """RMSNorm over the last dim, times weight, times a sigmoid gate, in float32 throughout.

        y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)

    Args:
      x, gate: bfloat16 or float32; gate before its sigmoid.
      weight: one for all heads.
      eps: inside the root, at least 0.
      impl: "pallas_gpu", "pallas_tpu", "chunked", "ref", "pallas"; None chooses by platform.
    Returns:
      y in x's dtype, rounded once.
    Raises:
      ValueError: shapes disagree, a dtype is not floating, or eps is negative.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: the output norm of Kimi Linear, arXiv:2510.26692.
    """
    check_arrays(x=x, gate=gate, weight=weight)
    if x.ndim == 0 or gate.shape != x.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"gate has shape {gate.shape} and weight {weight.shape}; "
            f"x {x.shape} needs {x.shape} and {x.shape[-1:]}."
        )
    check_float(x=x, gate=gate, weight=weight)
    if check_number("eps", eps) < 0:
        raise ValueError(f"eps={eps} is negative. Use e.g. 1e-5.")
    names = choose.candidates(_IMPLS, _ORDER, impl)
    return choose.first_that_runs(_IMPLS, names, x, gate, weight, eps=eps)
