"""sparse_flash_attention over blocks of queries: a gathered (latent | k_rope) serves all heads.

The backward rebuilds the probabilities from the saved lse. Its row gradients are summed over heads
first and then added into the rows in float32: by a scatter, or (deterministic) by a product with
the block's dense probabilities, whose sums have one order on every platform.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import (
    NO_KEY_LSE,
    accum_dtype,
    add_rows,
    chosen_mask,
    limit_by_bytes,
    scan_queries,
    take_rows,
    zeros_of,
)
from pallas_kernels.padding import without_padding
from pallas_kernels.saved import ATTENDED, saved

_QUERY_BLOCK = 64
# Bytes of a sequence's gathered rows and scores in flight.
_BUDGET = 32 << 20


def _dot(spec, a, b, dtype):
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


def _block_limit(q_BTNK, num_keys):
    """Queries in a block: each holds num_keys rows of K and two scores a head."""
    N, K = q_BTNK.shape[2:]
    bytes_per_query = num_keys * (K * q_BTNK.dtype.itemsize + 2 * N * accum_dtype(q_BTNK).itemsize)
    return limit_by_bytes(bytes_per_query, _BUDGET, _QUERY_BLOCK)


def _chosen_scores(q_BtNK, rows_BSK, indices_BtJ, scale):
    """Gathered rows [B, t, J, K] and scores [B, t, N, J], -inf where no key was chosen."""
    rows_BtJK = take_rows(rows_BSK, indices_BtJ)
    s_BtNJ = scale * _dot("BtNK,BtJK->BtNJ", q_BtNK, rows_BtJK, accum_dtype(q_BtNK))
    return rows_BtJK, jnp.where((indices_BtJ >= 0)[:, :, None], s_BtNJ, -jnp.inf)


def _forward(q_BTNK, rows_BSK, indices_BTJ, C, scale):
    dtype = accum_dtype(q_BTNK)

    def query_block(carry, start, blocks):
        rows_BtJK, s_BtNJ = _chosen_scores(blocks[0], rows_BSK, blocks[1], scale)
        top_BtN = s_BtNJ.max(-1)
        top_BtN = jnp.where(top_BtN > -jnp.inf, top_BtN, 0)
        p_BtNJ = jnp.exp(s_BtNJ - top_BtN[..., None])
        total_BtN = p_BtNJ.sum(-1)
        safe = jnp.where(total_BtN > 0, total_BtN, 1)
        out = _dot("BtNJ,BtJC->BtNC", p_BtNJ.astype(q_BTNK.dtype), rows_BtJK[..., :C], dtype)
        lse = jnp.where(total_BtN > 0, top_BtN + jnp.log(safe), NO_KEY_LSE)
        return carry, (out / safe[..., None], lse)

    limit = _block_limit(q_BTNK, indices_BTJ.shape[2])
    return scan_queries(query_block, None, (q_BTNK, indices_BTJ), limit)[1]


def _probabilities(s_BtNx, dp_BtNx, lse_BtN, shift_BtN, scale):
    """p, and ds = scale * p * (dp + shift) with shift = dlse - rowsum(dout * out)."""
    p = jnp.where(s_BtNx > -jnp.inf, jnp.exp(s_BtNx - lse_BtN[..., None]), 0)
    return p, scale * p * (dp_BtNx + shift_BtN[..., None])


def _backward_by_scatter(q_BTNK, rows_BSK, indices_BTJ, lse, dout, shift, C, scale):
    dtype, low = accum_dtype(q_BTNK), q_BTNK.dtype

    def query_block(drows_BSK, start, blocks):
        q_BtNK, indices_BtJ, lse_BtN, dout_BtNC, shift_BtN = blocks
        rows_BtJK, s_BtNJ = _chosen_scores(q_BtNK, rows_BSK, indices_BtJ, scale)
        dp_BtNJ = _dot("BtNC,BtJC->BtNJ", dout_BtNC, rows_BtJK[..., :C], dtype)
        p, ds = _probabilities(s_BtNJ, dp_BtNJ, lse_BtN, shift_BtN, scale)
        p, ds = p.astype(low), ds.astype(low)
        dq_BtNK = _dot("BtNJ,BtJK->BtNK", ds, rows_BtJK, dtype).astype(low)
        update_BtJK = _dot("BtNJ,BtNK->BtJK", ds, q_BtNK, dtype)
        values_BtJC = _dot("BtNJ,BtNC->BtJC", p, dout_BtNC, dtype)
        update_BtJK = update_BtJK.at[..., :C].add(values_BtJC)
        return add_rows(drows_BSK, indices_BtJ, update_BtJK), (dq_BtNK,)

    xs = (q_BTNK, indices_BTJ, lse, dout, shift)
    limit = _block_limit(q_BTNK, indices_BTJ.shape[2])
    drows, (dq,) = scan_queries(query_block, zeros_of(q_BTNK, rows_BSK.shape, dtype), xs, limit)
    return dq, drows


def _chosen_rows(indices_BTJ, num_rows):
    """[B, S]: which rows any query chose."""
    indices = jnp.where(indices_BTJ < 0, num_rows, indices_BTJ).reshape(len(indices_BTJ), -1)
    return jax.vmap(lambda i: jnp.zeros(num_rows, bool).at[i].set(True, mode="drop"))(indices)


def backward_dense(q_BTNK, rows_BSK, indices_BTJ, lse, dout, shift, C, scale):
    """Gradients of queries, and in float32 of rows, by products with dense probabilities."""
    dtype, low = accum_dtype(q_BTNK), q_BTNK.dtype
    S = rows_BSK.shape[1]
    # a probability of 0 does not keep a NaN out of a product: rows nobody chose, queries of no key
    (rows_BSK,) = without_padding(_chosen_rows(indices_BTJ, S), rows_BSK)
    (q_BTNK,) = without_padding((indices_BTJ >= 0).any(2), q_BTNK)
    values_BSC = rows_BSK[..., :C]

    def query_block(drows_BSK, start, blocks):
        q_BtNK, indices_BtJ, lse_BtN, dout_BtNC, shift_BtN = blocks
        s_BtNS = scale * _dot("BtNK,BSK->BtNS", q_BtNK, rows_BSK, dtype)
        s_BtNS = jnp.where(chosen_mask(indices_BtJ, S)[:, :, None], s_BtNS, -jnp.inf)
        dp_BtNS = _dot("BtNC,BSC->BtNS", dout_BtNC, values_BSC, dtype)
        p, ds = _probabilities(s_BtNS, dp_BtNS, lse_BtN, shift_BtN, scale)
        p, ds = p.astype(low), ds.astype(low)
        dq_BtNK = _dot("BtNS,BSK->BtNK", ds, rows_BSK, dtype).astype(low)
        drows_BSK += _dot("BtNS,BtNK->BSK", ds, q_BtNK, dtype)
        return drows_BSK.at[..., :C].add(_dot("BtNS,BtNC->BSC", p, dout_BtNC, dtype)), (dq_BtNK,)

    xs = (q_BTNK, indices_BTJ, lse, dout, shift)
    drows = zeros_of(q_BTNK, rows_BSK.shape, dtype)
    drows, (dq,) = scan_queries(query_block, drows, xs, _block_limit(q_BTNK, S))
    return dq, drows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(q_BTNK, rows_BSK, indices_BTJ, C, scale, deterministic):
    return _forward(q_BTNK, rows_BSK, indices_BTJ, C, scale)


def _attend_fwd(q_BTNK, rows_BSK, indices_BTJ, C, scale, deterministic):
    out, lse = saved(_forward(q_BTNK, rows_BSK, indices_BTJ, C, scale), ATTENDED)
    return (out, lse), (q_BTNK, rows_BSK, indices_BTJ, out, lse)


def _attend_bwd(C, scale, deterministic, residuals, cotangents):
    q_BTNK, rows_BSK, indices_BTJ, out, lse = residuals
    dout, dlse = cotangents
    shift_BTN = dlse - jnp.sum(dout * out, axis=-1)
    backward = backward_dense if deterministic else _backward_by_scatter
    dout = dout.astype(q_BTNK.dtype)
    dq, drows = backward(q_BTNK, rows_BSK, indices_BTJ, lse, dout, shift_BTN, C, scale)
    return dq, drows.astype(rows_BSK.dtype), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _joined(q_latent, q_rope, latent, k_rope):
    """(latent | rope) queries and rows, so that one gather fetches both parts."""
    return jnp.concatenate([q_latent, q_rope], -1), jnp.concatenate([latent, k_rope], -1)


def sparse_flash_attention(q_latent, q_rope, latent, k_rope, indices, *, scale, deterministic):
    """See api.py; differentiable once, through the output and the lse."""
    q_BTNK, rows_BSK = _joined(q_latent, q_rope, latent, k_rope)
    return _attend(q_BTNK, rows_BSK, indices, latent.shape[-1], scale, deterministic)


def sparse_max_logit(q_latent, q_rope, latent, k_rope, indices, *, scale):
    """See api.py."""
    parts = lax.stop_gradient((q_latent, q_rope, latent, k_rope))
    q_BTNK, rows_BSK = _joined(*parts)

    def query_block(top_BN, start, blocks):
        _, s_BtNJ = _chosen_scores(blocks[0], rows_BSK, blocks[1], scale)
        return jnp.maximum(top_BN, s_BtNJ.max((1, 3))), ()

    shape = (q_BTNK.shape[0], q_BTNK.shape[2])
    start = zeros_of(q_BTNK, shape, accum_dtype(q_BTNK), -jnp.inf)
    limit = _block_limit(q_BTNK, indices.shape[2])
    return scan_queries(query_block, start, (q_BTNK, indices), limit)[0].max(0)
