"""Gradients of mla_attention on GPUs: one kernel for queries, one for keys and values.

Both rebuild the probabilities from the lse. Each sum has one program and one order, so that every
run gives the same bits.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import _gpu
from pallas_kernels.choose import target_chip
from pallas_kernels.mla_attention import spans
from pallas_kernels.mla_attention.pallas_gpu_tile import LOG2_E, Kernel, Seen, Sizes, dots, parts
from pallas_kernels.mla_attention.tiles import tiles_for


def gradients(sizes: Sizes, q, k, v, seen: Seen, lse_BNT, dout, shift_BNT):
    """Of q, k and v, where ds = p (dout v' + shift); arrays as in `pallas_gpu._attend`."""
    tiles = tiles_for(sizes.H, sizes.h, q.dtype.itemsize, target_chip())
    dout = dout.astype(v.dtype)
    wide, thin = (q, k, v, dout), (lse_BNT, shift_BNT)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    by_query, by_key = Kernel(sizes, tiles.queries), Kernel(sizes, tiles.keys, by_key=True)
    (dq,) = by_query.call(_queries_body, "mla_attention_dq", seen, wide, thin, [like(q)])
    dk, dv = by_key.call(_keys_body, "mla_attention_dkv", seen, wide, thin, [like(k), like(v)])
    return dq, dk, dv


def _queries_body(kernel, tables, q_ref, k_ref, v_ref, dout_ref, lse_ref, shift_ref, dq_ref):
    sizes, factor = kernel.sizes, kernel.sizes.scale * LOG2_E
    own, span = kernel.own(tables)
    q_offset = span[spans.OFFSET]
    q_tH, dout_th = own.read(q_ref, sizes.H), own.read(dout_ref, sizes.h)
    lse_t1 = own.read_thin(lse_ref)[:, None] * LOG2_E
    shift_t1 = own.read_thin(shift_ref)[:, None]

    def step(keys, dq_tH, masked):
        k_sH = keys.read(k_ref, sizes.H, masked)
        p_ts = jnp.exp2(dots(q_tH, k_sH) * factor - lse_t1)
        if masked:
            p_ts = jnp.where(kernel.visible(tables, own, keys, q_offset, 1), p_ts, 0)
        dp_ts = dots(dout_th, keys.read(v_ref, sizes.h, masked))
        ds_ts = (p_ts * (dp_ts + shift_t1)).astype(k_ref.dtype)
        return [dq + _gpu.dot(ds_ts, k) for dq, k in zip(dq_tH, k_sH, strict=True)]

    zeros = [jnp.zeros((kernel.tile.queries, w), jnp.float32) for _, w in parts(sizes.H)]
    dq_tH = kernel.loop(tables, span, step, zeros)
    own.write(dq_ref, [dq * sizes.scale for dq in dq_tH], sizes.T)


def _keys_body(kernel, tables, q_ref, k_ref, v_ref, dout_ref, lse_ref, shift_ref, dk_ref, dv_ref):
    sizes, factor = kernel.sizes, kernel.sizes.scale * LOG2_E
    own, span = kernel.own(tables)
    q_offset = span[spans.OFFSET]
    k_sH, v_sh = own.read(k_ref, sizes.H), own.read(v_ref, sizes.h)

    def step(queries, carry, masked):
        dk_sH, dv_sh = carry
        q_tH = queries.read(q_ref, sizes.H, masked)
        dout_th = queries.read(dout_ref, sizes.h, masked)
        lse_1t = queries.read_thin(lse_ref, masked)[None, :] * LOG2_E
        p_st = jnp.exp2(dots(k_sH, q_tH) * factor - lse_1t)
        if masked:
            p_st = jnp.where(kernel.visible(tables, queries, own, q_offset, 0), p_st, 0)
        low_st = p_st.astype(v_ref.dtype)
        dv_sh = [dv + _gpu.dot(low_st, d) for dv, d in zip(dv_sh, dout_th, strict=True)]
        shift_1t = queries.read_thin(shift_ref, masked)[None, :]
        ds_st = (p_st * (dots(v_sh, dout_th) + shift_1t)).astype(q_ref.dtype)
        dk_sH = [dk + _gpu.dot(ds_st, q) for dk, q in zip(dk_sH, q_tH, strict=True)]
        return dk_sH, dv_sh

    zeros = [
        [jnp.zeros((kernel.tile.keys, w), jnp.float32) for _, w in parts(width)]
        for width in (sizes.H, sizes.h)
    ]
    dk_sH, dv_sh = kernel.loop(tables, span, step, tuple(zeros))
    own.write(dk_ref, [dk * sizes.scale for dk in dk_sH], sizes.S)
    own.write(dv_ref, dv_sh, sizes.S)
