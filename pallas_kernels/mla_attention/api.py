"""Public functions: checks, defaults, choice of implementation."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import blocks, checks, choose
from pallas_kernels.mla_attention import chunked, pallas_gpu, pallas_tpu, ref

_IMPLS: dict[str, Callable[..., Any]] = {
    "pallas_gpu": pallas_gpu.mla_attention, "pallas_tpu": pallas_tpu.mla_attention,
    "chunked": chunked.mla_attention, "ref": ref.mla_attention,
}  # fmt: skip
_MAX_IMPLS: dict[str, Callable[..., Any]] = {"chunked": chunked.max_logit, "ref": ref.max_logit}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"), "tpu": ("pallas_tpu", "chunked"), "cpu": ("chunked",),
}  # fmt: skip
_MAX_ORDER = {"cpu": ("chunked",)}


def mla_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N h"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    causal: bool = True,
    indices: Int[Array, "B T J"] | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "B T N h"], Float[Array, "B T N"]]:
    """Dense softmax attention of expanded MLA, exact, in memory linear in T and S.

    With z_ts = scale * <q_t, k_s> over the keys visible to query t:
        out_t = sum_s exp(z_ts - lse_t) v_s,    lse_t = log sum_s exp(z_ts)
    Key s is visible if it has the query's segment id, that id is not 0, and (causal)
    s <= t + q_offset. A query that sees no key gives output 0 and lse 1e30.

    Args:
      q, k, v: bfloat16 or float32, one dtype; products in it, softmax and sums in float32.
      scale: factor on the scores, e.g. H ** -0.5: a finite Python number.
      segment_ids: document of each query, non-decreasing along a row, 0 = padding; all 1 if None.
      kv_segment_ids: document of each key; `segment_ids` if None (then S must equal T).
      q_offset: position of the first query among the keys.
      causal: False lets a query see its document's future too.
      indices: the keys that a query chose, of those visible to it; one given twice counts once.
        Outside 0 to S - 1 is an empty slot, -1 for example. None lets it see all. The work stays
        that of all keys.
      impl: "chunked", "ref", "pallas", or None to choose.
    Returns:
      Output and lse in float32 (float64 for float64 inputs). Both are differentiable, once.
    Raises:
      ValueError: shapes or dtypes disagree, an array but v is empty, a number is out of bounds.
      TypeError: an argument is of another type than said above.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: DeepSeek-V2, arXiv:2405.04434; online softmax: FlashAttention, arXiv:2205.14135.
    """
    dims = "q: B T+ N+ H+; k: B S+ N H; v: B S N h"
    sizes = blocks.check_shapes("mla_attention", dims, q=q, k=k, v=v)
    blocks.check_one_dtype("mla_attention", q=q, k=k, v=v)
    seg_q, seg_k = blocks.check_both_segments(
        "mla_attention", segment_ids, kv_segment_ids, sizes["B"], sizes["T"], sizes["S"]
    )
    scale = checks.check_number("mla_attention: scale", scale)
    causal = checks.check_flag("mla_attention: causal", causal)
    q_offset = checks.check_offset("mla_attention: q_offset", q_offset, sizes["T"])
    names = choose.candidates(_IMPLS, _ORDER, impl)
    if indices is not None:
        indices = blocks.check_indices("mla_attention", indices, sizes["B"], sizes["T"], sizes["S"])
    args = (q, k, v, seg_q, seg_k, q_offset, indices)
    return choose.first_that_runs(_IMPLS, names, *args, scale=scale, causal=causal)


def max_logit(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    *,
    scale: float,
    segment_ids: Int[Array, "B T"] | None = None,
    impl: str | None = None,
) -> Float[Array, "N"]:
    """Largest visible score of each head, scale * <q_bt, k_bs> with s <= t, for QK-clip.

    Args: as in `mla_attention`.
    Returns:
      float32 [N]; -inf for a batch of nothing but padding. No gradient.
    Raises:
      ValueError, TypeError, NotImplementedError: as `mla_attention`.
    Source: Kimi K2, arXiv:2507.20534, section 2.1.
    """
    sizes = blocks.check_shapes("max_logit", "q: B T+ N+ H+; k: B T N H", q=q, k=k)
    blocks.check_one_dtype("max_logit", q=q, k=k)
    seg = blocks.check_segments("max_logit", "segment_ids", segment_ids, (sizes["B"], sizes["T"]))
    scale = checks.check_number("max_logit: scale", scale)
    names = choose.candidates(_MAX_IMPLS, _MAX_ORDER, impl)
    return choose.first_that_runs(_MAX_IMPLS, names, q, k, seg, scale=scale)
