"""Public entry of attn_res."""

import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import choose
from pallas_kernels.attn_res import chunked, pallas_gpu, pallas_tpu, ref
from pallas_kernels.checks import check_arrays, check_float, check_int, check_number, check_rank

_IMPLS = {
    "pallas_gpu": pallas_gpu.attn_res,
    "pallas_tpu": pallas_tpu.attn_res,
    "chunked": chunked.attn_res,
    "ref": ref.attn_res,
}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"),
    "tpu": ("pallas_tpu", "chunked"),
    "cpu": ("chunked",),
}


def attn_res(
    query: Float[Array, " D"],
    norm_weight: Float[Array, " D"],
    sources: Float[Array, "X B T D"],
    *,
    num_sources: int | Int[Array, ""] | None = None,
    eps: float,
    impl: str | None = None,
) -> Float[Array, "B T D"]:
    """Mixes residual sources per token by a softmax over depth.

    logit_m = <query * norm_weight, b_m / rms(b_m)>,   mix = sum_m softmax(logit)_m b_m
    with rms(b) = sqrt(mean(b^2) + eps); no 1/sqrt(D), and the values are the raw sources.

    Args:
      query, norm_weight: [D]; they act through their product only.
      sources: [X, B, T, D], bfloat16 or float32; scored and summed in float32.
      num_sources: how many of the X count, from 1; an int or a traced int32 scalar. None for all.
        The others may hold anything, and get a zero gradient.
      eps: of the RMS norm.
      impl: None, "pallas_gpu", "pallas_tpu", "chunked" or "ref".
    Returns:
      [B, T, D] in the sources' dtype.
    Raises:
      ValueError: shapes disagree, a dtype is of another kind, a static `num_sources` is outside
        1..X, eps is negative, or `impl` is unknown.
    Source: Attention Residuals, as in Kimi K3.
    """
    _check(query, norm_weight, sources, num_sources, eps)
    if isinstance(num_sources, int | np.integer):
        num_sources = int(num_sources)
    num_given = sources.shape[0]
    limit = num_given if num_sources is None else num_sources
    if isinstance(limit, int) and not 1 <= limit <= num_given:
        raise ValueError(f"num_sources={limit} is outside 1..{num_given}, the sources given.")
    names = choose.candidates(_IMPLS, _ORDER, impl)
    options = {"num_sources": limit, "eps": eps}
    return choose.first_that_runs(_IMPLS, names, query, norm_weight, sources, **options)


def _check(query, norm_weight, sources, num_sources, eps) -> None:
    check_rank("sources", sources, "X B T D")
    check_arrays(query=query, norm_weight=norm_weight, sources=sources)
    for name, vector in (("query", query), ("norm_weight", norm_weight)):
        check_rank(name, vector, "D")
        if vector.shape != sources.shape[-1:]:
            raise ValueError(
                f"{name} has shape {vector.shape}; sources {sources.shape} need "
                f"{sources.shape[-1:]}."
            )
    check_float(query=query, norm_weight=norm_weight, sources=sources)
    if isinstance(num_sources, float):
        raise ValueError(f"num_sources={num_sources} is a float; give an integer, or None for all.")
    if hasattr(num_sources, "dtype"):
        check_int(num_sources=num_sources)
    if check_number("eps", eps) < 0:
        raise ValueError(f"eps={eps} is negative. Use e.g. 1e-6.")
