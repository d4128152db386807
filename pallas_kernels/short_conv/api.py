"""Short causal convolution: the public function, its checks and the choice of implementation."""

from jaxtyping import Array, Float, Int

from pallas_kernels import choose
from pallas_kernels.checks import check_arrays, check_float, check_int
from pallas_kernels.short_conv import chunked, pallas_gpu, ref

_IMPLS = {
    "pallas_gpu": pallas_gpu.short_conv,
    "chunked": chunked.short_conv,
    "ref": ref.short_conv,
}
_ORDER = {"gpu": ("pallas_gpu", "chunked"), "cpu": ("chunked",)}
_ACTIVATIONS = ("silu", None)


def short_conv(
    x: Float[Array, "B T X"],
    taps: Float[Array, "K X"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B K_1 X"] | None = None,
    activation: str | None = "silu",
    impl: str | None = None,
) -> tuple[Float[Array, "B T X"], Float[Array, "B K_1 X"]]:
    """Depthwise causal convolution over a few positions, each channel by itself.

        y_t = activation( sum_{j < K} taps_j x_{t - K + 1 + j} )

    where inputs of another document than t's count as 0.

    Args:
      x: bfloat16 or float32; summed in float32.
      taps: the last one is for the current position.
      segment_ids: documents packed into a row, each one run of equal ids; 0 is padding, which
        counts as 0, NaN too, and has outputs and gradients of 0.
      initial_state: the K-1 inputs before position 0, of the row's first document; zeros if None.
      activation: "silu" or None.
      impl: "pallas_gpu", "chunked", "ref", "pallas"; None chooses by platform.
    Returns:
      y in x's dtype, and the last K-1 inputs of the document that ends the row (0 where it is
      shorter) in x's dtype: the initial state of what follows.
    Raises:
      ValueError: shapes disagree, T is 0, a dtype is of another kind, or the activation is
        unknown.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: Kimi Linear, arXiv:2510.26692; the form is that of Mamba, arXiv:2312.00752.
    """
    _check(x, taps, segment_ids, initial_state, activation)
    names = choose.candidates(_IMPLS, _ORDER, impl)
    return choose.first_that_runs(
        _IMPLS, names, x, taps,
        segment_ids=segment_ids, initial_state=initial_state, activation=activation,
    )  # fmt: skip


def _check(x, taps, segment_ids, initial_state, activation):
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation={activation!r} is unknown. Use 'silu' or None.")
    check_arrays(x=x, taps=taps)
    if x.ndim != 3 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {x.shape}; it must be [B, T, channels], none of them empty.")
    B, T, X = x.shape
    if taps.ndim != 2 or taps.shape[0] == 0 or taps.shape[1] != X:
        raise ValueError(f"taps has shape {taps.shape}; x {x.shape} needs [taps, {X}].")
    if segment_ids is not None and segment_ids.shape != (B, T):
        raise ValueError(f"segment_ids has shape {segment_ids.shape}; x needs {(B, T)}.")
    check_float(x=x, taps=taps, initial_state=initial_state)
    check_int(segment_ids=segment_ids)
    wanted = (B, taps.shape[0] - 1, X)
    if initial_state is not None and initial_state.shape != wanted:
        raise ValueError(f"initial_state has shape {initial_state.shape}; the taps need {wanted}.")
