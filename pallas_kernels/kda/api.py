"""Kimi Delta Attention: the public functions, their checks and the choice of implementation."""

from jaxtyping import Array, Float, Int

from pallas_kernels import choose
from pallas_kernels.checks import (
    check_arrays,
    check_float,
    check_int,
    check_number,
    check_rank,
    is_int,
)
from pallas_kernels.kda import chunked, composed, pallas_gpu, pallas_tpu, ref
from pallas_kernels.padding import without_padding

_IMPLS = {
    "pallas_gpu": pallas_gpu.kda,
    "pallas_tpu": pallas_tpu.kda,
    "chunked": chunked.kda,
    "ref": ref.kda,
}
_FUSED = {
    "pallas_gpu": pallas_gpu.kda_fused,
    "pallas_tpu": pallas_tpu.kda_fused,
    "chunked": composed.fused(chunked.kda),
    "ref": composed.fused(ref.kda),
}
_ORDER = {
    "gpu": ("pallas_gpu", "chunked"),
    "tpu": ("pallas_tpu", "chunked"),
    "cpu": ("chunked",),
}


def kda(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T Nv h"],
    log_decay: Float[Array, "B T Nv H"],
    beta: Float[Array, "B T Nv"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B Nv H h"] | None = None,
    scale: float | int | None = None,
    chunk: int = 64,
    impl: str | None = None,
) -> tuple[Float[Array, "B T Nv h"], Float[Array, "B Nv H h"]]:
    """Kimi Delta Attention over whole sequences, linear in T.

    Per head, with state S (H by h), a_t = exp(log_decay_t) and S = 0 where a document starts:

        S_t = (I - beta_t k_t k_t') diag(a_t) S_{t-1} + beta_t k_t v_t',    o_t = scale S_t' q_t

    Args:
      q, k: bfloat16 or float32; k at unit length per head, or the state may grow.
      v: Nv is a multiple of N; value head j reads key head j * N // Nv.
      log_decay: natural log of the decay, at most 0; float32 whatever q is.
      beta: write strength in [0, 1].
      segment_ids: documents packed into a row, each one run of equal ids; 0 is padding, which
        neither writes nor decays, may hold NaN, and has outputs and gradients of 0. None: every
        row is one document.
      initial_state: state before position 0, for the first document of the row; zeros if None.
      scale: H ** -0.5 if None.
      chunk: positions handled at once, a power of two. Changes speed and rounding, not meaning.
      impl: "chunked", "ref", "pallas"; None chooses by platform.
    Returns:
      Output in v's dtype, and the state after position T-1 (of the document that T-1 belongs to,
      so zero after padding at the end; of a row of padding alone `initial_state`) in float32. Sums
      are float64 if an input is.
    Raises:
      ValueError: shapes disagree, one is empty, a dtype is of another kind, or `chunk` is not a
        power of two.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: Kimi Linear, arXiv:2510.26692, equation 1 and section 4.
    """
    _check(q, k, v, {"log_decay": log_decay, "beta": beta}, segment_ids, initial_state, chunk)
    log_decay, beta = without_padding(segment_ids, log_decay, beta)
    return choose.first_that_runs(
        _IMPLS, choose.candidates(_IMPLS, _ORDER, impl), q, k, v, log_decay, beta,
        segment_ids=segment_ids, initial_state=initial_state, scale=_scale(scale, q), chunk=chunk,
    )  # fmt: skip


def kda_fused(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T Nv h"],
    gate: Float[Array, "B T Nv H"],
    beta_logits: Float[Array, "B T Nv"],
    a_log: Float[Array, " Nv"],
    dt_bias: Float[Array, "Nv H"],
    *,
    lower_bound: float | int | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    initial_state: Float[Array, "B Nv H h"] | None = None,
    scale: float | int | None = None,
    chunk: int = 64,
    return_transition: bool = False,
    impl: str | None = None,
) -> tuple[Array, ...]:
    """`kda` from what a layer has after its short convolutions.

    q and k are brought to unit length, x / sqrt(sum x^2 + 1e-6); beta = sigmoid(beta_logits);
    with a = exp(a_log), the log decay is

        -a softplus(gate + dt_bias),  or with a bound  lower_bound sigmoid(a (gate + dt_bias)).

    Args:
      lower_bound: below 0; None is the softplus form. The bound is another function, not a clamp.
      return_transition: also return how the row acts on its entry state, S_out = M S_in + S_ext.
      Others as in `kda`.
    Returns:
      Output and final state as `kda`; with `return_transition` also M, [B, Nv, H, H], and S_ext,
      [B, Nv, H, h], both float32. M is 0 where a document starts inside the row.
    Raises:
      ValueError: as `kda`, or `lower_bound` is not negative.
      NotImplementedError: `impl` was named and cannot run these arguments.
    Source: Kimi Linear, arXiv:2510.26692; the bounded gate: Kimi K3 report, arXiv:2607.24653.
    """
    if lower_bound is not None and not check_number("lower_bound", lower_bound) < 0:
        raise ValueError(f"lower_bound={lower_bound} is not negative. Use e.g. -5, or None.")
    inputs = {"gate": gate, "beta_logits": beta_logits}
    _check(q, k, v, inputs, segment_ids, initial_state, chunk)
    check_arrays(a_log=a_log, dt_bias=dt_bias)
    check_float(a_log=a_log, dt_bias=dt_bias)
    heads = gate.shape[2:]
    if a_log.shape != heads[:1] or dt_bias.shape != heads:
        raise ValueError(
            f"a_log has shape {a_log.shape} and dt_bias {dt_bias.shape}; "
            f"gate {gate.shape} needs {heads[:1]} and {heads}."
        )
    return choose.first_that_runs(
        _FUSED, choose.candidates(_FUSED, _ORDER, impl),
        q, k, v, gate, beta_logits, a_log, dt_bias,
        lower_bound=None if lower_bound is None else float(lower_bound), segment_ids=segment_ids,
        initial_state=initial_state, scale=_scale(scale, q), chunk=chunk,
        return_transition=return_transition,
    )  # fmt: skip


def _scale(scale, q):
    return q.shape[-1] ** -0.5 if scale is None else check_number("scale", scale)


def _check(q, k, v, per_head, segment_ids, initial_state, chunk):
    """`per_head`: by name, what decays and write strengths come from."""
    (decay_name, decay), (beta_name, beta) = per_head.items()
    check_rank("q", q, "B+ T+ N+ H+")
    check_rank("v", v, "B+ T+ Nv+ h+")
    check_arrays(q=q, k=k, v=v, **per_head)
    check_float(q=q, k=k, v=v, initial_state=initial_state, **per_head)
    check_int(segment_ids=segment_ids)
    B, T, N, H = q.shape
    Nv, h = v.shape[2:]
    if Nv % N:
        raise ValueError(f"v has {Nv} heads, q has {N}. Use a multiple of {N} for v.")
    wanted = {
        "k": (k, (B, T, N, H)),
        "v": (v, (B, T, Nv, h)),
        decay_name: (decay, (B, T, Nv, H)),
        beta_name: (beta, (B, T, Nv)),
        "segment_ids": (segment_ids, (B, T)),
        "initial_state": (initial_state, (B, Nv, H, h)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}; q {q.shape} and v need {shape}.")
    if not is_int(chunk) or chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk={chunk!r} is not a power of two. Use 16, 32, 64 or 128.")
