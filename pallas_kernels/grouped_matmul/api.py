"""Public entry of grouped_matmul."""

from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels import choose
from pallas_kernels.checks import check_arrays, check_float, check_int, check_number, check_rank
from pallas_kernels.grouped_matmul import activation as activations
from pallas_kernels.grouped_matmul import chunked, mxfp4, pallas_gpu, pallas_tpu, ref

_IMPLS = {
    "pallas_gpu": pallas_gpu.grouped_matmul,
    "pallas_tpu": pallas_tpu.grouped_matmul,
    "chunked": chunked.grouped_matmul,
    "ref": ref.grouped_matmul,
}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"),
    "tpu": ("pallas_tpu", "chunked"),
    "cpu": ("chunked",),
}


def grouped_matmul(
    rows: Float[Array, "R K"],
    weights: Shaped[Array, "E _ F"],
    group_sizes: Int[Array, "_"],
    *,
    activation: str | None = None,
    situ_betas: tuple[float, float | None] = (4.0, 25.0),
    scales: UInt8[Array, "E _ F"] | None = None,
    lora: tuple[Array, Array] | None = None,
    lora_scale: float = 1.0,
    impl: str | None = None,
) -> Float[Array, "R F2"]:
    """Multiplies each run of rows by the weight of its group.

    The first group_sizes[0] rows belong to group 0, the next group_sizes[1] to group 1, ...:
        out[r] = rows[r] @ weights[e] + lora_scale (rows[r] @ a[e]) @ b[e],    e = group(r),
    then the activation, if one is named. Rows past the sum of the sizes give exactly 0, whatever
    they hold, and pass no gradient. Products in the input dtype, sums and activation in float32;
    the backward recomputes gate and up, and forms no gradient of weights that need none.

    Args:
      rows: [R, K], sorted by group.
      weights: [E, K, F]. With an activation, F = 2 * inner: first half gate, second half up. Or,
        with `scales`, packed MXFP4: uint8 [E, K/2, F], two codes along K a byte, low nibble first.
        They are unpacked to the dtype of the rows, exactly, one group at a time; no gradient.
      group_sizes: int32 [E], at least 0, sum at most R. Empty groups get a zero gradient.
      activation: None, "situ" or "swiglu".
      situ_betas: bounds of gate and up in "situ"; None for the second leaves the up linear.
      scales: uint8 [E, K/32, F], an exponent per 32 codes along K.
      lora: low-rank adapters (a, b): a [E, K, Q], or [K, Q] for all groups, and b [E, Q, F].
      lora_scale: factor of the adapters, static.
      impl: None, "pallas_gpu", "pallas_tpu", "chunked" or "ref".
    Returns:
      [R, F], or [R, F / 2] with an activation, in rows' dtype.
    Raises:
      ValueError: shapes disagree, one is empty (R may be 0), a dtype is of another kind,
        `activation` or `impl` is unknown, F is odd with one, or `situ_betas` are not positive.
    Source: README.md beside this file.
    """
    check_rank("rows", rows, "R K+")
    check_rank("weights", weights, "E+ K+ F+")
    check_rank("group_sizes", group_sizes, "E")
    check_arrays(rows=rows, weights=weights, group_sizes=group_sizes)
    check_float(rows=rows)
    check_int(group_sizes=group_sizes)
    E, K, F = weights.shape
    if scales is not None:
        _check_packed(weights, scales)
        K *= 2
    else:
        check_float(weights=weights)
    if E != group_sizes.shape[0] or K != rows.shape[1]:
        raise ValueError(
            f"rows {rows.shape}, weights {weights.shape}, sizes {group_sizes.shape} disagree. "
            "Give [R, K], [E, K, F] (packed: [E, K/2, F]) and [E]."
        )
    if activation is not None and activation not in activations.NAMES:
        raise ValueError(
            f"activation={activation!r} is unknown. Use None, {', '.join(activations.NAMES)}."
        )
    if activation is not None and F % 2:
        raise ValueError(
            f"weights have {F} columns, which do not halve into gate and up. "
            "Give 2 * inner columns."
        )
    if activation == "situ":
        _check_betas(situ_betas)
    tree = {"base": weights}
    if scales is not None:
        tree["scales"] = scales
    if lora is not None:
        _check_lora(lora, (E, K, F))
        tree["a"], tree["b"] = lora
    names = choose.candidates(_IMPLS, _ORDER, impl)
    scale = check_number("lora_scale", lora_scale)
    options = {"activation": activation, "situ_betas": situ_betas, "lora_scale": scale}
    return choose.first_that_runs(_IMPLS, names, rows, tree, group_sizes, **options)


def _check_betas(betas) -> None:
    pair = isinstance(betas, tuple | list) and len(betas) == 2
    if (
        not pair
        or betas[0] is None
        or not all(b is None or check_number("situ_betas", b) > 0 for b in betas)
    ):
        raise ValueError(
            f"situ_betas={betas!r} is no pair of positive numbers. Give e.g. (4.0, 25.0), or None "
            "for the second."
        )


def _check_packed(weights, scales) -> None:
    check_rank("scales", scales, "E K/32 F")
    E, half, F = weights.shape
    if (weights.dtype, scales.dtype) != ("uint8", "uint8"):
        raise ValueError(
            f"packed weights and scales are {weights.dtype} and {scales.dtype}; give uint8."
        )
    if scales.shape[1] * mxfp4.BLOCK != half * 2 or (scales.shape[0], scales.shape[2]) != (E, F):
        raise ValueError(
            f"packed weights {weights.shape} and scales {scales.shape} disagree. "
            "Give [E, K/2, F] and [E, K/32, F]."
        )


def _check_lora(lora, shape: tuple[int, int, int]) -> None:
    E, K, F = shape
    if not isinstance(lora, tuple | list) or len(lora) != 2:
        raise ValueError(f"lora is a {type(lora).__name__}, not two adapters. Give (a, b).")
    a, b = lora
    check_rank("lora a", a, "K Q+" if getattr(a, "ndim", 3) == 2 else "E K Q+")
    check_rank("lora b", b, "E Q+ F")
    check_float(**{"lora a": a, "lora b": b})
    rank = a.shape[-1]
    if a.shape not in ((E, K, rank), (K, rank)) or b.shape != (E, rank, F):
        raise ValueError(
            f"adapters {a.shape} and {b.shape} do not fit weights {shape}. "
            "Give [E, K, Q] or [K, Q], and [E, Q, F]."
        )
