"""mla_attention for TPUs: one kernel forward, two back. README.md has the maths.

A block of scores has keys down and queries across, so that what belongs to a query, its maximum,
sum and lse, is a row, as those lie in memory. The grid's last axis goes through the tiles that a
tile may meet, with sums in on-chip memory; tiles that cannot meet are neither fetched nor computed.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.blocks import NO_KEY_LSE
from pallas_kernels.choose import target_chip
from pallas_kernels.mla_attention import chosen
from pallas_kernels.mla_attention.pallas_tpu_tile import Kernel, Seen, Sizes, vmem
from pallas_kernels.mla_attention.tiles import tpu_tile_for
from pallas_kernels.saved import ATTENDED, saved

_LOWEST = -1e30


def mla_attention(q, k, v, segment_ids, kv_segment_ids, q_offset, indices, *, scale, causal):
    """See api.py; differentiable once, through the output and the lse."""
    if q.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{q.dtype} has no kernel")
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise NotImplementedError("an empty array needs no kernel")
    B, T, N, H = q.shape
    S, h = k.shape[1], v.shape[-1]
    tile = tpu_tile_for(T, S, target_chip())
    num_q, num_k = pl.cdiv(T, tile.queries), pl.cdiv(S, tile.keys)
    sizes = Sizes(B, N, H, h, num_q, num_k, tile, float(scale), bool(causal))
    seg_q, seg_k = (
        jnp.pad(seg, ((0, 0), (0, length - seg.shape[1])))
        for seg, length in ((segment_ids, sizes.T), (kv_segment_ids, sizes.S))
    )
    bits = None if indices is None else chosen.pack(indices, sizes.T, sizes.S)
    seen = Seen(seg_q, seg_k, jnp.asarray(q_offset, jnp.int32), bits)
    heads = [_by_head(x, seg) for x, seg in ((q, seg_q), (k, seg_k), (v, seg_k))]
    out, lse = _attend(sizes, *heads, seen)
    return jnp.swapaxes(out, 1, 2)[:, :T], jnp.swapaxes(lse[:, :, 0], 1, 2)[:, :T]


def _by_head(x_BXNH, seg_BX):
    """[B, N, X, H], lengthened; rows of padding are 0, as 0 times what they hold may not be."""
    x = jnp.pad(x_BXNH, ((0, 0), (0, seg_BX.shape[1] - x_BXNH.shape[1]), (0, 0), (0, 0)))
    x = jnp.where((seg_BX > 0)[..., None, None], x, jnp.zeros((), x.dtype))
    return jnp.swapaxes(x, 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(sizes: Sizes, q, k, v, seen: Seen):
    """Of [B, N, X, H]: output, and lse [B, N, 1, T]."""
    kernel, t = Kernel(sizes), sizes.tile.queries
    out = [
        jax.ShapeDtypeStruct((sizes.B, sizes.N, sizes.T, sizes.h), jnp.float32),
        jax.ShapeDtypeStruct((sizes.B, sizes.N, 1, sizes.T), jnp.float32),
    ]
    return tuple(
        kernel.call(
            _body, "mla_attention", seen, (q, k, v),
            (kernel.of_queries(sizes.H), kernel.of_keys(sizes.H), kernel.of_keys(sizes.h)),
            out, (kernel.of_queries(sizes.h), kernel.thin()),
            [vmem(1, t), vmem(1, t), vmem(sizes.h, t)],
        )
    )  # fmt: skip


def _attend_fwd(sizes, q, k, v, seen):
    out, lse = saved(_attend(sizes, q, k, v, seen), ATTENDED)
    return (out, lse), (q, k, v, seen, out, lse)


def _attend_bwd(sizes, residuals, cotangents):
    q, k, v, seen, out, lse = residuals
    dout, dlse = cotangents
    shift = dlse - jnp.sum(dout * out, axis=-1)[:, :, None]
    given = (q, k, v, dout.astype(v.dtype), lse, shift)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
    grads = []
    for kernel, body, name, widths, outs in (
        (Kernel(sizes), _queries_body, "mla_attention_dq", [(sizes.H, sizes.tile.queries)], [q]),
        (
            Kernel(sizes, by_key=True), _keys_body, "mla_attention_dkv",
            [(sizes.tile.keys, sizes.H), (sizes.tile.keys, sizes.h)], [k, v],
        ),
    ):  # fmt: skip
        specs = (
            kernel.of_queries(sizes.H), kernel.of_keys(sizes.H), kernel.of_keys(sizes.h),
            kernel.of_queries(sizes.h), kernel.thin(), kernel.thin(),
        )  # fmt: skip
        own = kernel.of_keys if kernel.by_key else kernel.of_queries
        grads += kernel.call(
            body, name, seen, given, specs, [like(x) for x in outs],
            [own(x.shape[3]) for x in outs], [vmem(*shape) for shape in widths],
        )  # fmt: skip
    return *grads, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _body(kernel: Kernel, tables, q_ref, k_ref, v_ref, out_ref, lse_ref, *sums):
    top_ref, total_ref, sum_ref = sums

    def start():
        top_ref[...] = jnp.full_like(top_ref, _LOWEST)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def step(mask_st):
        s_st = _tpu.dot(k_ref[...], q_ref[...], trans_b=True) * kernel.sizes.scale
        if mask_st is not None:
            s_st = jnp.where(mask_st, s_st, -jnp.inf)
        top_1t = top_ref[...]
        new_top_1t = jnp.maximum(top_1t, jnp.max(s_st, axis=0, keepdims=True))
        p_st, fade_1t = jnp.exp(s_st - new_top_1t), jnp.exp(top_1t - new_top_1t)
        total_ref[...] = fade_1t * total_ref[...] + jnp.sum(p_st, axis=0, keepdims=True)
        add_ht = _tpu.dot(v_ref[...], p_st.astype(v_ref.dtype), trans_a=True)
        sum_ref[...] = fade_1t * sum_ref[...] + add_ht
        top_ref[...] = new_top_1t

    def end():
        seen_1t = total_ref[...] > 0
        safe_1t = jnp.where(seen_1t, total_ref[...], 1)
        out_ref[...] = (sum_ref[...] / safe_1t).T
        lse_ref[...] = jnp.where(seen_1t, top_ref[...] + jnp.log(safe_1t), NO_KEY_LSE)

    kernel.loop(tables, start, step, end)


def _weights(kernel: Kernel, mask_st, q_ref, k_ref, v_ref, dout_ref, lse_ref, shift_ref):
    """p, and ds without the scale, in the inputs' dtype."""
    s_st = _tpu.dot(k_ref[...], q_ref[...], trans_b=True) * kernel.sizes.scale
    p_st = jnp.exp(s_st - lse_ref[...])
    if mask_st is not None:
        p_st = jnp.where(mask_st, p_st, 0)
    dp_st = _tpu.dot(v_ref[...], dout_ref[...], trans_b=True)
    return p_st.astype(v_ref.dtype), (p_st * (dp_st + shift_ref[...])).astype(k_ref.dtype)


def _queries_body(kernel: Kernel, tables, *refs):
    *given, dq_ref, sum_ref = refs

    def start():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def step(mask_st):
        _, ds_st = _weights(kernel, mask_st, *given)
        sum_ref[...] += _tpu.dot(given[1][...], ds_st, trans_a=True)

    def end():
        dq_ref[...] = (sum_ref[...] * kernel.sizes.scale).T.astype(dq_ref.dtype)

    kernel.loop(tables, start, step, end)


def _keys_body(kernel: Kernel, tables, *refs):
    *given, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs
    q_ref, dout_ref = given[0], given[3]

    def start():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    def step(mask_st):
        p_st, ds_st = _weights(kernel, mask_st, *given)
        dv_sum_ref[...] += _tpu.dot(p_st, dout_ref[...])
        dk_sum_ref[...] += _tpu.dot(ds_st, q_ref[...])

    def end():
        dk_ref[...] = (dk_sum_ref[...] * kernel.sizes.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)

    kernel.loop(tables, start, step, end)
