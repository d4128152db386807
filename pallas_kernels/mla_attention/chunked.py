"""mla_attention in blocks of queries and keys: memory linear in T and S, on any platform.

The forward keeps a running maximum and sum per query; the backward rebuilds each block of
probabilities from the saved lse. Key blocks that lie wholly in a block's future are not visited.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import (
    NO_KEY_LSE,
    accum_dtype,
    chosen_mask,
    pad_dim1,
    scan_queries,
    split,
    visible,
    zeros_of,
)
from pallas_kernels.padding import without_padding
from pallas_kernels.saved import ATTENDED, saved

_QUERY_BLOCK = 128
_KEY_BLOCK = 256
# Where the running maximum starts: finite, so that exp(-inf - start) is 0 and not nan.
_LOWEST = -1e30


def _dot(spec, a, b, dtype):
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


class _Keys:
    """Keys (and values) head-major and padded to whole blocks, with what hides them."""

    def __init__(self, seg_BS, *arrays_BSNx):
        self.num, self.block = split(seg_BS.shape[1], _KEY_BLOCK)
        whole = self.num * self.block
        self.seg_BS = pad_dim1(seg_BS, whole)
        self.arrays_BNSx = [jnp.swapaxes(pad_dim1(x, whole), 1, 2) for x in arrays_BSNx]

    def read(self, index):
        """Block `index`: each array [B, N, s, x], segment ids [B, s] and positions [s]."""
        start = index * self.block
        cut = lambda x, dim: lax.dynamic_slice_in_dim(x, start, self.block, dim)  # noqa: E731
        positions = start + jnp.arange(self.block, dtype=jnp.int32)
        return *(cut(x, 2) for x in self.arrays_BNSx), cut(self.seg_BS, 1), positions

    def chosen(self, blocks):
        """Which keys a block of queries chose, [B, t, S]; `blocks` holds their indices, or none."""
        return [chosen_mask(indices, self.num * self.block) for indices in blocks]

    def visible(self, index, chosen, *args):
        """`blocks.visible` with a dim for heads, of what was also `chosen`."""
        mask = visible(*args)
        for chosen_BtS in chosen:
            mask &= lax.dynamic_slice_in_dim(chosen_BtS, index * self.block, self.block, 2)
        return mask[:, None]

    def loop(self, last_pos, causal, body, carry):
        """carry = body(index, carry) over the blocks that a query at `last_pos` may see."""
        if self.num == 1:
            return body(0, carry)
        end = jnp.clip(last_pos // self.block + 1, 0, self.num) if causal else self.num
        return lax.fori_loop(0, end, body, carry)


def _forward(q, k, v, seg_q, seg_k, q_offset, indices, scale, causal):
    dtype = accum_dtype(q)
    keys = _Keys(seg_k, k, v)

    def query_block(carry, start, blocks):
        q_BtNH, seg_Bt, *rest = blocks
        chosen = keys.chosen(rest)
        q_BNtH = jnp.swapaxes(q_BtNH, 1, 2)
        B, N, t, _ = q_BNtH.shape
        pos_t = q_offset + start + jnp.arange(t, dtype=jnp.int32)

        def key_block(index, state):
            top_BNt, total_BNt, out_BNth = state
            k_BNsH, v_BNsh, seg_Bs, pos_s = keys.read(index)
            mask = keys.visible(index, chosen, seg_Bt, seg_Bs, pos_t, pos_s, causal)
            s_BNts = scale * _dot("BNtH,BNsH->BNts", q_BNtH, k_BNsH, dtype)
            s_BNts = jnp.where(mask, s_BNts, -jnp.inf)
            new_top = jnp.maximum(top_BNt, s_BNts.max(-1))
            p_BNts = jnp.exp(s_BNts - new_top[..., None])
            fade = jnp.exp(top_BNt - new_top)
            add = _dot("BNts,BNsh->BNth", p_BNts.astype(v.dtype), v_BNsh, dtype)
            return new_top, fade * total_BNt + p_BNts.sum(-1), fade[..., None] * out_BNth + add

        state = (
            zeros_of(q_BtNH, (B, N, t), dtype, _LOWEST),
            zeros_of(q_BtNH, (B, N, t), dtype),
            zeros_of(q_BtNH, (B, N, t, v.shape[-1]), dtype),
        )
        top, total, out = keys.loop(pos_t[-1], causal, key_block, state)
        seen = total > 0
        safe = jnp.where(seen, total, 1)
        lse = jnp.where(seen, top + jnp.log(safe), NO_KEY_LSE)
        return carry, (jnp.swapaxes(out / safe[..., None], 1, 2), jnp.swapaxes(lse, 1, 2))

    xs = (q, seg_q) if indices is None else (q, seg_q, indices)
    return scan_queries(query_block, None, xs, _QUERY_BLOCK)[1]


def _backward(q, k, v, seg_q, seg_k, q_offset, indices, out, lse, dout, dlse, scale, causal):
    """ds = p * (dout v' - rowsum(dout * out) + dlse); the sums over queries ride in the carry."""
    dtype = accum_dtype(q)
    keys = _Keys(seg_k, k, v)
    shift_BTN = dlse - jnp.sum(dout * out, axis=-1)

    def query_block(sums, start, blocks):
        q_BNtH, dout_BNth, lse_BNt, shift_BNt = (jnp.swapaxes(x, 1, 2) for x in blocks[:4])
        seg_Bt, chosen = blocks[4], keys.chosen(blocks[5:])
        pos_t = q_offset + start + jnp.arange(seg_Bt.shape[1], dtype=jnp.int32)

        def key_block(index, state):
            dq_BNtH, dk_BNSH, dv_BNSh = state
            k_BNsH, v_BNsh, seg_Bs, pos_s = keys.read(index)
            mask = keys.visible(index, chosen, seg_Bt, seg_Bs, pos_t, pos_s, causal)
            s_BNts = scale * _dot("BNtH,BNsH->BNts", q_BNtH, k_BNsH, dtype)
            p_BNts = jnp.where(mask, jnp.exp(s_BNts - lse_BNt[..., None]), 0)
            dp_BNts = _dot("BNth,BNsh->BNts", dout_BNth, v_BNsh, dtype)
            ds_BNts = (scale * p_BNts * (dp_BNts + shift_BNt[..., None])).astype(q.dtype)
            dv_BNsh = _dot("BNts,BNth->BNsh", p_BNts.astype(v.dtype), dout_BNth, dtype)
            dk_BNsH = _dot("BNts,BNtH->BNsH", ds_BNts, q_BNtH, dtype)
            dq_BNtH += _dot("BNts,BNsH->BNtH", ds_BNts, k_BNsH, dtype)
            return dq_BNtH, _add_at(dk_BNSH, dk_BNsH, index), _add_at(dv_BNSh, dv_BNsh, index)

        state = (zeros_of(q_BNtH, q_BNtH.shape, dtype), *sums)
        dq_BNtH, *sums = keys.loop(pos_t[-1], causal, key_block, state)
        return tuple(sums), (jnp.swapaxes(dq_BNtH, 1, 2).astype(q.dtype),)

    sums = tuple(zeros_of(q, x.shape, dtype) for x in keys.arrays_BNSx)
    xs = (q, dout.astype(v.dtype), lse, shift_BTN, seg_q, *([] if indices is None else [indices]))
    sums, (dq,) = scan_queries(query_block, sums, xs, _QUERY_BLOCK)
    dk, dv = (jnp.swapaxes(x, 1, 2)[:, : k.shape[1]].astype(k.dtype) for x in sums)
    return dq, dk, dv


def _add_at(total_BNSx, part_BNsx, index):
    """Adds a key block's share at its place."""
    start, size = index * part_BNsx.shape[2], part_BNsx.shape[2]
    if size == total_BNSx.shape[2]:
        return total_BNSx + part_BNsx
    old = lax.dynamic_slice_in_dim(total_BNSx, start, size, 2)
    return lax.dynamic_update_slice_in_dim(total_BNSx, old + part_BNsx, start, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _attend(q, k, v, seg_q, seg_k, q_offset, indices, scale, causal):
    return _forward(q, k, v, seg_q, seg_k, q_offset, indices, scale, causal)


def _attend_fwd(q, k, v, seg_q, seg_k, q_offset, indices, scale, causal):
    out, lse = saved(_forward(q, k, v, seg_q, seg_k, q_offset, indices, scale, causal), ATTENDED)
    return (out, lse), (q, k, v, seg_q, seg_k, q_offset, indices, out, lse)


def _attend_bwd(scale, causal, residuals, cotangents):
    q, k, v, seg_q, seg_k, q_offset, indices, out, lse = residuals
    dout, dlse = cotangents
    grads = _backward(q, k, v, seg_q, seg_k, q_offset, indices, out, lse, dout, dlse, scale, causal)
    return *grads, None, None, None, None


_attend.defvjp(_attend_fwd, _attend_bwd)


def mla_attention(q, k, v, segment_ids, kv_segment_ids, q_offset, indices, *, scale, causal):
    """See api.py; differentiable once, through the output and the lse."""
    # a probability of 0 does not keep a NaN of padding out of a product
    (q,), (k, v) = without_padding(segment_ids, q), without_padding(kv_segment_ids, k, v)
    out, lse = _attend(q, k, v, segment_ids, kv_segment_ids, q_offset, indices, scale, causal)
    return without_padding(segment_ids, out)[0], lse


def max_logit(q, k, segment_ids, *, scale):
    """See api.py; one pass over the score blocks, nothing kept but the maxima."""
    q, k = lax.stop_gradient((q, k))
    dtype = accum_dtype(q)
    keys = _Keys(segment_ids, k)

    def query_block(top_BN, start, blocks):
        q_BtNH, seg_Bt = blocks
        pos_t = start + jnp.arange(seg_Bt.shape[1], dtype=jnp.int32)

        def key_block(index, top_BN):
            k_BNsH, seg_Bs, pos_s = keys.read(index)
            mask = visible(seg_Bt, seg_Bs, pos_t, pos_s)[:, None]
            s_BNts = scale * _dot("BtNH,BNsH->BNts", q_BtNH, k_BNsH, dtype)
            return jnp.maximum(top_BN, jnp.where(mask, s_BNts, -jnp.inf).max((2, 3)))

        return keys.loop(pos_t[-1], True, key_block, top_BN), ()

    start = zeros_of(q, (q.shape[0], q.shape[2]), dtype, -jnp.inf)
    return scan_queries(query_block, start, (q, segment_ids), _QUERY_BLOCK)[0].max(0)
