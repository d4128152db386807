"""indexer_kl over blocks of queries; the backward rebuilds both distributions of each block.

With rho = softmax(I) and target p on a query's set, dI = rho - p: only the inputs are kept.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import (
    accum_dtype,
    add_rows,
    limit_by_bytes,
    scan_queries,
    take_rows,
    visible,
    zeros_of,
)
from pallas_kernels.indexer_kl.distributions import Distributions
from pallas_kernels.lightning_indexer.scores import head_dots, index_scores, weight_factor
from pallas_kernels.padding import without_padding

_QUERY_BLOCK = 64
# Bytes of a sequence's gathered rows, scores and dot products in flight.
_BUDGET = 32 << 20


def _dot(spec, a, b, dtype):
    return jnp.einsum(spec, a, b, preferred_element_type=dtype)


class _Block:
    """A block of queries against its keys: the chosen ones [B, t, J, .], or all [B, S, .]."""

    def __init__(self, blocks, start, keys, scale, sparse):
        self.q_idx, self.w_idx, q_main, lse_BtN, seg_Bt, *chosen = blocks
        k_idx, rows, (_, seg_BS, q_offset) = keys
        if sparse:
            self.indices = chosen[0]
            self.k_idx, rows = take_rows(k_idx, self.indices), take_rows(rows, self.indices)
            mask_Btx = self.indices >= 0
        else:
            self.k_idx = k_idx
            pos_t = q_offset + start + jnp.arange(seg_Bt.shape[1], dtype=jnp.int32)
            pos_S = jnp.arange(k_idx.shape[1], dtype=jnp.int32)
            mask_Btx = visible(seg_Bt, seg_BS, pos_t, pos_S)
        spec = "BtNK,BtxK->BtNx" if sparse else "BtNK,BxK->BtNx"
        z_BtNx = scale * _dot(spec, q_main, rows, lse_BtN.dtype) - lse_BtN[..., None]
        summed_Btx = jnp.where(mask_Btx[:, :, None], jnp.exp(z_BtNx), 0).sum(2)
        self.dots_BtUx = head_dots(self.q_idx, self.k_idx)
        scores_Btx = index_scores(self.dots_BtUx, self.w_idx, self.q_idx.shape[-1])
        self.distributions = Distributions.of(summed_Btx, scores_Btx, mask_Btx)


def _inputs(q_idx, w_idx, q_main, lse, seg_BT, indices):
    """What is cut into query blocks; the chosen indices only where there are some."""
    xs = (q_idx, w_idx, q_main, lse, seg_BT)
    return xs if indices is None else (*xs, indices)


def _block_limit(q_idx, q_main, num_keys):
    numbers = q_main.shape[-1] + 2 * q_main.shape[2] + q_idx.shape[-1] + 3 * q_idx.shape[2]
    return limit_by_bytes(num_keys * numbers * accum_dtype(q_idx).itemsize, _BUDGET, _QUERY_BLOCK)


def _num_keys(k_idx, indices):
    return k_idx.shape[1] if indices is None else indices.shape[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _kl(q_idx, k_idx, w_idx, q_main, rows, lse, indices, places, scale):
    keys = (k_idx, rows, places)

    def query_block(carry, start, blocks):
        block = _Block(blocks, start, keys, scale, indices is not None)
        return carry, (block.distributions.kl(),)

    xs = _inputs(q_idx, w_idx, q_main, lse, places[0], indices)
    limit = _block_limit(q_idx, q_main, _num_keys(k_idx, indices))
    return scan_queries(query_block, None, xs, limit)[1][0]


def _kl_fwd(*args):
    return _kl(*args), args[:8]


def _kl_bwd(scale, residuals, dkl_BT):
    q_idx, k_idx, w_idx, q_main, rows, lse, indices, places = residuals
    dtype, low = accum_dtype(q_idx), q_idx.dtype
    U, u = q_idx.shape[2:]
    factor, sparse = weight_factor(U, u), indices is not None
    keys = (k_idx, rows, places)

    def query_block(dk_BSu, start, blocks):
        block = _Block(blocks[1:], start, keys, scale, sparse)
        ds_Btx = block.distributions.dscores(blocks[0]).astype(dtype)
        dots_BtUx, w_BtU = block.dots_BtUx, block.w_idx.astype(dtype)
        dw_BtU = factor * jnp.sum(ds_Btx[:, :, None] * jax.nn.relu(dots_BtUx), -1)
        ddots_BtUx = jnp.where(dots_BtUx > 0, factor * w_BtU[..., None] * ds_Btx[:, :, None], 0)
        ddots_BtUx = ddots_BtUx.astype(low)
        to_q = "BtUx,Btxu->BtUu" if sparse else "BtUx,Bxu->BtUu"
        dq_BtUu = _dot(to_q, ddots_BtUx, block.k_idx, dtype).astype(low)
        if sparse:
            update_Btxu = _dot("BtUx,BtUu->Btxu", ddots_BtUx, block.q_idx, dtype)
            dk_BSu = add_rows(dk_BSu, block.indices, update_Btxu)
        else:
            dk_BSu += _dot("BtUx,BtUu->Bxu", ddots_BtUx, block.q_idx, dtype)
        return dk_BSu, (dq_BtUu, dw_BtU.astype(w_idx.dtype))

    xs = (dkl_BT, *_inputs(q_idx, w_idx, q_main, lse, places[0], indices))
    limit = _block_limit(q_idx, q_main, _num_keys(k_idx, indices))
    dk, (dq, dw) = scan_queries(query_block, zeros_of(q_idx, k_idx.shape, dtype), xs, limit)
    return dq, dk.astype(k_idx.dtype), dw, None, None, None, None, None


_kl.defvjp(_kl_fwd, _kl_bwd)


def indexer_kl(
    q_idx, k_idx, w_idx, q_latent, q_rope, latent, k_rope, lse, indices, places, *, scale
):
    """See api.py."""
    # a probability of 0 does not keep a NaN of padding out of a product
    seg_q, seg_k, _ = places
    q_idx, w_idx, q_latent, q_rope, lse = without_padding(
        seg_q, q_idx, w_idx, q_latent, q_rope, lse
    )
    if indices is None:
        k_idx, latent, k_rope = without_padding(seg_k, k_idx, latent, k_rope)
    else:
        indices = jnp.where((seg_q > 0)[..., None], indices, -1)
    main = lax.stop_gradient((q_latent, q_rope, latent, k_rope, lse))
    q_main = jnp.concatenate(main[:2], axis=-1)
    rows = jnp.concatenate(main[2:4], axis=-1)
    kl_BT = _kl(q_idx, k_idx, w_idx, q_main, rows, main[4], indices, places, scale)
    return without_padding(seg_q, kl_BT)[0]
