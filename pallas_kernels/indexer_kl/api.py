"""Public function: checks, defaults, choice of implementation."""

from jaxtyping import Array, Float, Int

from pallas_kernels import blocks, checks, choose
from pallas_kernels.indexer_kl import chunked, pallas_gpu, pallas_tpu, ref

_IMPLS = {
    "pallas_gpu": pallas_gpu.indexer_kl, "pallas_tpu": pallas_tpu.indexer_kl,
    "chunked": chunked.indexer_kl, "ref": ref.indexer_kl,
}  # fmt: skip
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"), "tpu": ("pallas_tpu", "chunked"), "cpu": ("chunked",),
}  # fmt: skip


def indexer_kl(
    q_idx: Float[Array, "B T U u"],
    k_idx: Float[Array, "B S u"],
    w_idx: Float[Array, "B T U"],
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    latent: Float[Array, "B S C"],
    k_rope: Float[Array, "B S R"],
    lse: Float[Array, "B T N"],
    *,
    scale: float,
    indices: Int[Array, "B T J"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_offset: int | Int[Array, ""] = 0,
    impl: str | None = None,
) -> Float[Array, "B T"]:
    """KL(p_t || softmax(I_t)) of each query, the loss that trains the lightning indexer.

    p_ts = sum_n exp(z_tns - lse_tn) over heads, divided by its sum over s, where z are the main
    attention's scores scale * (<q_latent, latent_s> + <q_rope, k_rope_s>); I as in
    `lightning_indexer`. Both run over `indices[t]` (sparse stage) or, if None, over all keys of the
    query's document up to t (dense warm-up). Gradient goes to q_idx, k_idx and w_idx only:
    dI = softmax(I) - p on the set. A query with one key, or none, gives exactly 0.

    Args:
      q_idx, k_idx: bfloat16 or float32, one dtype. w_idx: raw head weights, bfloat16 or
        float32.
      q_latent, q_rope, latent, k_rope: the main attention's, one dtype.
      lse: float32, of the main attention over the same keys.
      scale: the main attention's factor on its scores, a finite Python number.
      indices: the chosen keys, distinct for a query; outside 0 to S - 1 is an empty slot, -1 for
        example. None = all visible keys.
      segment_ids: document of each query, 0 = padding; all 1 if None. With `indices`, which
        respect documents already, only padding queries are taken from it.
      kv_segment_ids: document of each key; `segment_ids` if None (then S must equal T). Unused with
        `indices`, as is `q_offset`.
      q_offset: position of the first query among the keys.
      impl: "pallas_gpu", "pallas_tpu", "chunked", "ref", "pallas", or None to choose.
    Returns:
      float32 [B, T], at least 0 up to rounding. Differentiable once.
    Raises:
      ValueError: shapes or dtypes disagree, an array is empty (R may be 0), a number is out of
        bounds.
      TypeError: an argument is of another type than said above.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.1.
    """
    index = {"q_idx": q_idx, "k_idx": k_idx}
    main = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "k_rope": k_rope}
    dims = (
        "q_idx: B T+ U+ u+; k_idx: B S+ u; w_idx: B T U; q_latent: B T N+ C+; q_rope: B T N R;"
        "latent: B S C; k_rope: B S R; lse: B T N"
    )
    sizes = blocks.check_shapes("indexer_kl", dims, **index, **main, w_idx=w_idx, lse=lse)
    blocks.check_one_dtype("indexer_kl", **index)
    blocks.check_one_dtype("indexer_kl", **main)
    batch, queries = sizes["B"], sizes["T"]
    if indices is not None:
        indices = blocks.check_indices("indexer_kl", indices, batch, queries, sizes["S"])
        seg_q = blocks.check_segments("indexer_kl", "segment_ids", segment_ids, (batch, queries))
        seg_k = None
    else:
        seg_q, seg_k = blocks.check_both_segments(
            "indexer_kl", segment_ids, kv_segment_ids, batch, queries, sizes["S"]
        )
    scale = checks.check_number("indexer_kl: scale", scale)
    q_offset = checks.check_offset("indexer_kl: q_offset", q_offset, queries)
    names = choose.candidates(_IMPLS, _ORDER, impl)
    places = (seg_q, seg_k, q_offset)
    args = (q_idx, k_idx, w_idx, *main.values(), lse, indices, places)
    return choose.first_that_runs(_IMPLS, names, *args, scale=scale)
