"""Public functions: checks, defaults, choice of implementation."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from pallas_kernels import blocks, checks, choose
from pallas_kernels.sparse_flash_attention import chunked, pallas_gpu, pallas_tpu, ref

_IMPLS: dict[str, Callable[..., Any]] = {
    "pallas_gpu": pallas_gpu.sparse_flash_attention,
    "pallas_tpu": pallas_tpu.sparse_flash_attention,
    "chunked": chunked.sparse_flash_attention,
    "ref": ref.sparse_flash_attention,
}
_MAX_IMPLS = {"chunked": chunked.sparse_max_logit, "ref": ref.sparse_max_logit}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"), "tpu": ("pallas_tpu", "chunked"), "cpu": ("chunked",),
}  # fmt: skip
_MAX_ORDER = {"cpu": ("chunked",)}


def sparse_flash_attention(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    latent: Float[Array, "B S C"],
    k_rope: Float[Array, "B S R"],
    indices: Int[Array, "B T J"],
    *,
    scale: float,
    impl: str | None = None,
    deterministic: bool = False,
) -> tuple[Float[Array, "B T N C"], Float[Array, "B T N"]]:
    """Absorbed MLA with the softmax over the chosen keys of each query, shared by all heads.

    With z_ts = scale * (<q_latent_t, latent_s> + <q_rope_t, k_rope_s>) for s in indices[t]:
        out_t = sum_s exp(z_ts - lse_t) latent_s,    lse_t = log sum_s exp(z_ts)
    A query without a key gives output 0 and lse 1e30.

    Args:
      q_latent, q_rope, latent, k_rope: bfloat16 or float32, one dtype; products in it, softmax and
        sums in float32.
      indices: key positions, distinct for a query, in any order; outside 0 to S - 1 is an empty
        slot, -1 for example. They alone say what is visible: causality and documents are the
        indexer's work.
      scale: factor on the scores, a finite Python number.
      impl: "chunked", "ref", "pallas", or None to choose.
      deterministic: a backward without scatter-adds, the same bits at every run on a GPU too;
        its work grows with S instead of J.
    Returns:
      Output and lse in float32 (float64 for float64 inputs). Both are differentiable, once.
    Raises:
      ValueError: shapes or dtypes disagree, an array is empty (R may be 0), the scale is not
        finite.
      TypeError: an argument is of another type than said above.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: DeepSeek-V3.2, arXiv:2512.02556; absorbed form: DeepSeek-V2, arXiv:2405.04434.
    """
    op = "sparse_flash_attention"
    indices, scale = _check(op, q_latent, q_rope, latent, k_rope, indices, scale)
    deterministic = checks.check_flag(f"{op}: deterministic", deterministic)
    names = choose.candidates(_IMPLS, _ORDER, impl)
    args = (q_latent, q_rope, latent, k_rope, indices)
    options = {"scale": scale, "deterministic": deterministic}
    return choose.first_that_runs(_IMPLS, names, *args, **options)


def sparse_max_logit(
    q_latent: Float[Array, "B T N C"],
    q_rope: Float[Array, "B T N R"],
    latent: Float[Array, "B S C"],
    k_rope: Float[Array, "B S R"],
    indices: Int[Array, "B T J"],
    *,
    scale: float,
    impl: str | None = None,
) -> Float[Array, "N"]:
    """Largest score of each head over the chosen keys, all queries and sequences: for QK-clip.

    Args: as in `sparse_flash_attention`.
    Returns:
      float32 [N]; -inf if no query has a key. No gradient.
    Raises:
      ValueError, TypeError, NotImplementedError: as `sparse_flash_attention`.
    Source: Kimi K2, arXiv:2507.20534, section 2.1.
    """
    indices, scale = _check("sparse_max_logit", q_latent, q_rope, latent, k_rope, indices, scale)
    names = choose.candidates(_MAX_IMPLS, _MAX_ORDER, impl)
    args = (q_latent, q_rope, latent, k_rope, indices)
    return choose.first_that_runs(_MAX_IMPLS, names, *args, scale=scale)


def _check(op, q_latent, q_rope, latent, k_rope, indices, scale):
    """Indices with -1 in every empty slot, and the scale as a float."""
    arrays = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "k_rope": k_rope}
    dims = "q_latent: B T+ N+ C+; q_rope: B T N R; latent: B S+ C; k_rope: B S R"
    sizes = blocks.check_shapes(op, dims, **arrays)
    blocks.check_one_dtype(op, **arrays)
    indices = blocks.check_indices(op, indices, sizes["B"], sizes["T"], sizes["S"])
    return indices, checks.check_number(f"{op}: scale", scale)
