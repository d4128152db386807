"""Kimi Delta Attention for NVIDIA GPUs: two kernels forward, three back. README.md has the maths.

Forward, `kda_prep` takes the raw inputs of each chunk to all that does not need a state, and
`kda_scan` carries the states. Back, `kda_scan_back` carries their gradients; `kda_grads_states` and
`kda_grads_pairs` give those of all inputs. Kept in between: what `kda_prep` made, errors and entry
states.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import choose
from pallas_kernels.kda import composed, gates
from pallas_kernels.kda.pallas_gpu_chunk import Form, real_rows, runs
from pallas_kernels.kda.pallas_gpu_pairs import through_pairs
from pallas_kernels.kda.pallas_gpu_prep import Inputs, prepare
from pallas_kernels.kda.pallas_gpu_scan import scan, scan_back
from pallas_kernels.kda.pallas_gpu_states import through_states
from pallas_kernels.kda.tiles import Tiles, tiles_for


def kda(q, k, v, log_decay, beta, *, segment_ids, initial_state, scale, chunk):
    """`api.kda` with every default filled in; `chunk` is that of the tiles."""
    del chunk
    heads = log_decay.shape[2:]
    form = Form(False, None, scale, q.shape[1])
    weights = jnp.zeros(heads[:1], jnp.float32), jnp.zeros(heads, jnp.float32)
    return _run(form, v.dtype, q, k, v, log_decay, beta, *weights, segment_ids, initial_state)


def kda_fused(
    q, k, v, gate, beta_logits, a_log, dt_bias, *, lower_bound, segment_ids, initial_state,
    scale, chunk, return_transition,
):  # fmt: skip
    """`api.kda_fused` with every default filled in; `chunk` is that of the tiles."""
    del chunk
    form = Form(True, lower_bound, scale, q.shape[1])

    def run(values, entry, out_dtype):
        inputs = (q, k, values, gate, beta_logits, a_log, dt_bias)
        return _run(form, out_dtype, *inputs, segment_ids, entry)

    if not return_transition:
        return run(v, initial_state, v.dtype)
    # 0 and 1 are exact in any dtype; the output is not rounded before it meets the entry state
    wide = functools.partial(run, out_dtype=jnp.float32)
    return composed.with_transition(wide, v, q.shape[-1], v.dtype, initial_state)


def _run(form: Form, out_dtype, q, k, v, gate, beta, a_log, dt_bias, segment_ids, initial_state):
    _refuse(q, k, v, gate, beta)
    B, T, Nv, h = v.shape
    H = q.shape[-1]
    tiles = tiles_for(H, h, choose.target_chip())
    padding = -T % tiles.chunk
    if segment_ids is None:
        segment_ids = jnp.ones((B, T), jnp.int32)
    # the last document goes on, so that the state at the end is that of position T
    ids = jnp.pad(segment_ids.astype(jnp.int32), ((0, 0), (0, padding)), mode="edge")
    before = jnp.maximum(jnp.arange(0, T + padding, tiles.chunk) - 1, 0)
    if initial_state is None:
        initial_state = jnp.zeros((B, Nv, H, h), jnp.float32)
    q, k, v, gate, beta = (_filled(x, padding) for x in (q, k, v, gate, beta))
    sums = jnp.asarray(runs(form, tiles.chunk), jnp.bfloat16)
    least = min(tiles.prep_channels, tiles.states_channels, tiles.pairs_channels)
    zeros = jnp.zeros(max(tiles.chunk.bit_length(), H // least), jnp.int32)
    x = Inputs(q, k, v, gate, beta, a_log, dt_bias, ids, jnp.take(ids, before, axis=1), sums, zeros)
    out, final_state = _kda(form, out_dtype, tiles, x, initial_state)
    return out[:, :T], final_state


def _refuse(q, k, v, gate, beta) -> None:
    """Raises NotImplementedError where the kernels cannot take the arguments."""
    H, h = q.shape[-1], v.shape[-1]
    if q.dtype not in (jnp.bfloat16, jnp.float32) or not q.dtype == k.dtype == v.dtype:
        raise NotImplementedError(
            f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype} are not all bfloat16 or all float32"
        )
    if any(x.dtype.itemsize > 4 for x in (gate, beta)):
        raise NotImplementedError(f"gate of {gate.dtype} or beta of {beta.dtype} is too wide")
    if H & (H - 1) or not 16 <= H <= 256:
        raise NotImplementedError(f"head width {H} is not 16, 32, 64, 128 or 256")
    if h & (h - 1) or not 16 <= h <= 512:
        raise NotImplementedError(f"value width {h} is not 16, 32, 64, 128, 256 or 512")


def _filled(x, padding: int):
    return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kda(form: Form, out_dtype, tiles: Tiles, x: Inputs, initial_BNHh):
    return _forward(form, out_dtype, tiles, x, initial_BNHh, keep=False)[0]


def _forward(form: Form, out_dtype, tiles: Tiles, x: Inputs, initial_BNHh, *, keep: bool):
    prepared, errors = prepare(form, x, tiles)
    initial_GHh = initial_BNHh.reshape(-1, *initial_BNHh.shape[2:])
    out, final, *kept = scan(
        x, prepared, errors, initial_GHh, tiles, keep=keep, out_dtype=out_dtype
    )
    return (out, final.reshape(initial_BNHh.shape)), (prepared, *kept)


def _kda_fwd(form, out_dtype, tiles, x, initial_BNHh):
    results, kept = _forward(form, out_dtype, tiles, x, initial_BNHh, keep=True)
    return results, (x, kept, jnp.zeros(0, initial_BNHh.dtype))


def _kda_bwd(form, out_dtype, tiles, residuals, cotangents):
    none: Any = None  # integers have no gradient
    x, (prepared, errors, entries), initial = residuals
    d_out, d_final = cotangents
    d_final_GHh = d_final.reshape(-1, *d_final.shape[2:])
    dv, d_exits, d_initial = scan_back(form, x, prepared, d_out, d_final_GHh, tiles)
    partial = through_states(form, x, errors, dv, d_out, entries, d_exits, tiles)
    grads = through_pairs(form, x, partial, tiles)
    d_inputs = Inputs(
        _key_gradient(form, x.q_BPNH, grads.q_BPNH, x.ids_BP, form.scale),
        _key_gradient(form, x.k_BPNH, grads.k_BPNH, x.ids_BP, 1.0),
        dv, grads.gate_BPNH, grads.beta_BPN,
        _head_sum(grads.a_log_GCH, x).sum(-1).astype(x.a_log_N.dtype),
        _head_sum(grads.dt_bias_GCH, x).astype(x.dt_bias_NH.dtype), none, none,
        jnp.zeros_like(x.runs_K2cc), none,
    )  # fmt: skip
    return d_inputs, d_initial.reshape(d_final.shape).astype(initial.dtype)


_kda.defvjp(_kda_fwd, _kda_bwd)


def _key_gradient(form: Form, x_BPNH, d_BPNH, ids_BP, scale: float):
    """Gradient of q or k, from that of it at unit length and scaled, by value head.

    No kernel: a row's length takes all its channels, of which a kernel holds some at a time.
    """
    B, P, N, H = x_BPNH.shape
    d = scale * d_BPNH.astype(jnp.float32).reshape(B, P, N, -1, H).sum(3)
    real = jax.vmap(lambda ids_P: real_rows(form, ids_P, 0))(ids_BP)[..., None, None]
    if form.raw:
        x = jnp.where(real, x_BPNH.astype(jnp.float32), 0)
        _, pullback = jax.vjp(gates.unit_length, x)
        (d,) = pullback(d)
    return jnp.where(real, d, 0).astype(x_BPNH.dtype)


def _head_sum(shares_GCH, x: Inputs):
    """Sum over rows and chunks: [Nv, H]."""
    Nv, H = x.dt_bias_NH.shape
    return shares_GCH.reshape(-1, Nv, *shares_GCH.shape[1:]).sum((0, 2))
