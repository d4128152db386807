"""Public function: checks, defaults, choice of implementation."""

from typing import Literal, overload

from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import blocks, checks, choose
from pallas_kernels.lightning_indexer import chunked, pallas_gpu, pallas_tpu, ref

_IMPLS = {
    "pallas_gpu": pallas_gpu.lightning_indexer, "pallas_tpu": pallas_tpu.lightning_indexer,
    "chunked": chunked.lightning_indexer, "ref": ref.lightning_indexer,
}  # fmt: skip
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"), "tpu": ("pallas_tpu", "chunked"), "cpu": ("chunked",),
}  # fmt: skip
# Slots that may be asked for where there are fewer keys: each is allocated.
_MOST_SLOTS = 1 << 16


@overload
def lightning_indexer(
    q_idx: Float[Array, "B T U u"],
    k_idx: Float[Array, "B S u"],
    w_idx: Float[Array, "B T U"],
    *,
    top_k: int,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    order: Literal["score", "position", "any"] = "score",
    approx_recall: float | None = None,
    return_scores: Literal[False] = False,
    impl: str | None = None,
) -> Int32[Array, "B T J"]: ...


@overload
def lightning_indexer(
    q_idx: Float[Array, "B T U u"],
    k_idx: Float[Array, "B S u"],
    w_idx: Float[Array, "B T U"],
    *,
    top_k: int,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    order: Literal["score", "position", "any"] = "score",
    approx_recall: float | None = None,
    return_scores: Literal[True],
    impl: str | None = None,
) -> tuple[Int32[Array, "B T J"], Float[Array, "B T J"]]: ...


def lightning_indexer(
    q_idx: Float[Array, "B T U u"],
    k_idx: Float[Array, "B S u"],
    w_idx: Float[Array, "B T U"],
    *,
    top_k: int,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    order: Literal["score", "position", "any"] = "score",
    approx_recall: float | None = None,
    return_scores: bool = False,
    impl: str | None = None,
) -> Int32[Array, "B T J"] | tuple[Int32[Array, "B T J"], Float[Array, "B T J"]]:
    """The `top_k` visible keys of highest index score for each query, exactly unless told not to.

        I_ts = sum_j U^-1/2 u^-1/2 w_tj relu(<q_tj, k_s>)
    Key s is visible if it has the query's segment id, that id is not 0, and s <= t + q_offset.
    -0.0 and 0.0 tie; a NaN is below every number, and returned as the lowest one.
    Not differentiable: gradients through it are zero. The loss that trains it is `indexer_kl`.

    Args:
      q_idx, k_idx: bfloat16 or float32, one dtype; dot products summed in float32.
      w_idx: raw head weights, bfloat16 or float32; the two inverse roots are applied inside.
      top_k: J, from 1 to the larger of S and 65,536: it may exceed S, and every slot is allocated.
      segment_ids: document of each query, non-decreasing along a row, 0 = padding; all 1 if None.
      kv_segment_ids: document of each key; `segment_ids` if None (then S must equal T).
      q_offset: position of the first query among the keys.
      order: "score" falls by score, the lower index first in a tie; "position" rises by index: the
        same keys, found with less work on a GPU, and what reads them walks through memory; "any"
        is whichever of both takes less work.
      approx_recall: None is exact. Otherwise `lax.approx_max_k` may miss some, up to 1 minus this
        share of them on average; it does so on TPUs alone. `recall` tells what was missed.
      return_scores: also return the scores of the chosen keys.
      impl: "pallas_gpu", "pallas_tpu", "chunked", "ref", "pallas", or None to choose.
    Returns:
      int32 [B, T, J] in `order`, -1 behind them where fewer keys are visible; with
      `return_scores` also float32 [B, T, J], -inf where -1.
    Raises:
      ValueError: shapes or dtypes disagree, an array is empty, `top_k`, `q_offset`, `order` or
        `approx_recall` is not allowed.
      TypeError: an argument is of another type than said above.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: DeepSeek-V3.2, arXiv:2512.02556, equation 1.
    """
    dims = "q_idx: B T+ U+ u+; k_idx: B S+ u; w_idx: B T U"
    sizes = blocks.check_shapes("lightning_indexer", dims, q_idx=q_idx, k_idx=k_idx, w_idx=w_idx)
    blocks.check_one_dtype("lightning_indexer", q_idx=q_idx, k_idx=k_idx)
    top_k = checks.check_count("lightning_indexer: top_k", top_k, max(sizes["S"], _MOST_SLOTS))
    if not isinstance(order, str) or order not in ("score", "position", "any"):
        raise ValueError(f'lightning_indexer: order={order!r}. Use "score", "position" or "any".')
    if approx_recall is not None:
        approx_recall = checks.check_number("lightning_indexer: approx_recall", approx_recall)
        if not 0 < approx_recall <= 1:
            raise ValueError(
                f"lightning_indexer: approx_recall={approx_recall}. Give a share up to 1."
            )
    return_scores = checks.check_flag("lightning_indexer: return_scores", return_scores)
    q_offset = checks.check_offset("lightning_indexer: q_offset", q_offset, sizes["T"])
    seg_q, seg_k = blocks.check_both_segments(
        "lightning_indexer", segment_ids, kv_segment_ids, sizes["B"], sizes["T"], sizes["S"]
    )
    names = choose.candidates(_IMPLS, _ORDER, impl)
    args = (q_idx, k_idx, w_idx, seg_q, seg_k, q_offset)
    options = {"top_k": top_k, "order": order, "approx_recall": approx_recall}
    indices, scores = choose.first_that_runs(_IMPLS, names, *args, **options)
    return (indices, scores) if return_scores else indices
