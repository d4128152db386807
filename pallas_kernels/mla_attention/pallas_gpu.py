"""mla_attention for NVIDIA GPUs: one kernel forward, two back. README.md has the maths.

A program has a tile of one head's queries and goes through the tiles of keys that it can see: first
those that it sees whole, without a mask, then the ones at the diagonal and at documents' borders.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _gpu
from pallas_kernels.blocks import NO_KEY_LSE
from pallas_kernels.choose import target_chip
from pallas_kernels.mla_attention import spans
from pallas_kernels.mla_attention.pallas_gpu_grads import gradients
from pallas_kernels.mla_attention.pallas_gpu_tile import LOG2_E, Kernel, Seen, Sizes, dots, parts
from pallas_kernels.mla_attention.tiles import tiles_for
from pallas_kernels.saved import ATTENDED, saved

# Where the running maximum starts: finite, so that exp2(-inf - start) is 0 and not nan.
_LOWEST = -1e30


def mla_attention(q, k, v, segment_ids, kv_segment_ids, q_offset, indices, *, scale, causal):
    """See api.py; differentiable once, through the output and the lse."""
    _refuse(q, k, v, scale)
    B, T, N, H = q.shape
    sizes = Sizes(B, T, k.shape[1], N, H, v.shape[-1], float(scale), bool(causal))
    seen = Seen(segment_ids, kv_segment_ids, jnp.asarray(q_offset, jnp.int32), indices)
    flat = [x.reshape(*x.shape[:2], -1) for x in (q, k, v)]
    out, lse_BNT = _attend(sizes, *flat, seen)
    return out.reshape(B, T, N, -1), jnp.swapaxes(lse_BNT, 1, 2)


def _refuse(q, k, v, scale):
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{q.dtype} has no kernel")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise NotImplementedError("an empty array needs no kernel")
    for name, width in (("head", q.shape[-1]), ("value", v.shape[-1])):
        if width % 16 or width > 256:
            raise NotImplementedError(f"{name} width {width} is not a multiple of 16 up to 256")
    if not scale > 0:
        raise NotImplementedError(f"scale={scale} is not positive")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, q, k, v, seen: Seen):
    """Of heads side by side, [B, X, N H]; lse is [B, N, T]."""
    kernel = Kernel(sizes, tiles_for(sizes.H, sizes.h, q.dtype.itemsize, target_chip()).forward)
    return kernel.call(
        _body, "mla_attention", seen, (q, k, v), (),
        [jax.ShapeDtypeStruct((sizes.B, sizes.T, sizes.N * sizes.h), jnp.float32)],
        [jax.ShapeDtypeStruct((sizes.B, sizes.N, sizes.T), jnp.float32)],
    )  # fmt: skip


def _attend_fwd(sizes, q, k, v, seen):
    out, lse = saved(_attend(sizes, q, k, v, seen), ATTENDED)
    return (out, lse), (q, k, v, seen, out, lse)


def _attend_bwd(sizes, residuals, cotangents):
    q, k, v, seen, out, lse_BNT = residuals
    dout, dlse_BNT = cotangents
    per_head = (dout * out).reshape(sizes.B, sizes.T, sizes.N, sizes.h)
    shift_BNT = dlse_BNT - jnp.swapaxes(per_head.sum(-1), 1, 2)
    return *gradients(sizes, q, k, v, seen, lse_BNT, dout, shift_BNT), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _body(kernel: Kernel, tables, q_ref, k_ref, v_ref, out_ref, lse_ref):
    sizes, factor = kernel.sizes, kernel.sizes.scale * LOG2_E
    own, span = kernel.own(tables)
    q_offset = span[spans.OFFSET]
    q_tH = own.read(q_ref, sizes.H)

    def step(keys, carry, masked):
        top_t, total_t, out_th = carry
        s_ts = dots(q_tH, keys.read(k_ref, sizes.H, masked)) * factor
        if masked:
            s_ts = jnp.where(kernel.visible(tables, own, keys, q_offset, 1), s_ts, -jnp.inf)
        new_top_t = jnp.maximum(top_t, jnp.max(s_ts, axis=1))
        p_ts = jnp.exp2(s_ts - new_top_t[:, None])
        fade_t = jnp.exp2(top_t - new_top_t)
        total_t = fade_t * total_t + jnp.sum(p_ts, axis=1)
        v_sh = keys.read(v_ref, sizes.h, masked)
        p_ts = p_ts.astype(v_ref.dtype)
        out_th = [
            fade_t[:, None] * out + _gpu.dot(p_ts, v) for out, v in zip(out_th, v_sh, strict=True)
        ]
        return new_top_t, total_t, out_th

    t = kernel.tile.queries
    zeros_t = jnp.zeros((t,), jnp.float32)
    out_th = [jnp.zeros((t, width), jnp.float32) for _, width in parts(sizes.h)]
    top_t, total_t, out_th = kernel.loop(tables, span, step, (zeros_t + _LOWEST, zeros_t, out_th))
    safe_t = jnp.where(total_t > 0, total_t, 1)
    own.write(out_ref, [out / safe_t[:, None] for out in out_th], sizes.T)
    lse_t = jnp.where(total_t > 0, (top_t + jnp.log2(safe_t)) / LOG2_E, NO_KEY_LSE)
    _gpu.store(lse_ref.at[own.at], lse_t, own.positions_x < sizes.T)
