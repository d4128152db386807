"""indexer_kl out of three kernels, by blocks of queries, with the distributions between them.

What the kernels leave between each other is one number a query and key: [block, J] or [block, S].
The backward runs the first two again, so that only the inputs are kept.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import scan_queries, visible
from pallas_kernels.indexer_kl.distributions import Distributions


class Kernels(NamedTuple):
    """What a device brings; each takes a `Set` first.

    target: (q_main, rows, lse) -> [B, t, x], probabilities summed over heads.
    scores: (q_idx, k_idx, w_idx) -> [B, t, x]. Both may leave anything outside the set.
    gradients: (q_idx, k_idx, w_idx, dscores, dk) -> (dq, dk, dw); dk in float32, plus its own.
    limit: (batch, keys of a query, whether they are chosen) -> most queries of a block.
    """

    target: Callable
    scores: Callable
    gradients: Callable
    limit: Callable


class Set(NamedTuple):
    """The keys of a block of queries: the chosen ones, or all visible ones.

    indices: [B, t, J] with -1 in empty slots, or None.
    seg_Bt, seg_BS, start: documents, and the first query's position among the keys; for the dense
      stage.
    """

    indices: jax.Array | None
    seg_Bt: jax.Array
    seg_BS: jax.Array
    start: jax.Array

    def mask(self) -> jax.Array:
        """[B, t, x], which keys are of the set."""
        if self.indices is not None:
            return self.indices >= 0
        pos_t = self.start + jnp.arange(self.seg_Bt.shape[1], dtype=jnp.int32)
        pos_S = jnp.arange(self.seg_BS.shape[1], dtype=jnp.int32)
        return visible(self.seg_Bt, self.seg_BS, pos_t, pos_S)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def kl(kernels: Kernels, index, main, lse, indices, places):
    """KL [B, T] of `index`, (q, k, w), with the target of `main`, ((q, ..), (rows, ..)).

    `places` are documents of queries and of keys, and the first query's position among the keys.
    """

    def query_block(carry, start, blocks):
        return carry, (_distributions(kernels, index, main, blocks, start, places)[0].kl(),)

    xs = _cut(index, main, lse, indices, places[0])
    limit = _limit(kernels, index, indices)
    return scan_queries(query_block, None, xs, limit)[1][0]


def _kl_fwd(kernels, *args):
    return kl(kernels, *args), args


def _kl_bwd(kernels, args, dkl_BT):
    index, main, lse, indices, places = args
    q_idx, k_idx, w_idx = index

    def query_block(dk_BSu, start, blocks):
        dkl_Bt, *blocks = blocks
        found, keys = _distributions(kernels, index, main, blocks, start, places)
        dscores_Btx = found.dscores(dkl_Bt).astype(jnp.float32)
        q_Bt, w_Bt = blocks[:2]
        dq, dk_BSu, dw = kernels.gradients(keys, q_Bt, k_idx, w_Bt, dscores_Btx, dk_BSu)
        return dk_BSu, (dq.astype(q_idx.dtype), dw.astype(w_idx.dtype))

    xs = (dkl_BT, *_cut(index, main, lse, indices, places[0]))
    dk = jnp.zeros(k_idx.shape, jnp.float32)
    dk, (dq, dw) = scan_queries(query_block, dk, xs, _limit(kernels, index, indices))
    return (dq, dk.astype(k_idx.dtype), dw), None, None, None, None


kl.defvjp(_kl_fwd, _kl_bwd)


def _cut(index, main, lse, indices, seg_BT):
    """What a block has a part of."""
    chosen = () if indices is None else (indices,)
    return (index[0], index[2], lse, seg_BT, *main[0], *chosen)


def _limit(kernels, index, indices):
    B, S, _ = index[1].shape
    return kernels.limit(B, S if indices is None else indices.shape[2], indices is not None)


def _distributions(kernels, index, main, blocks, start, places):
    q_idx, w_idx, lse, seg_Bt, *rest = blocks
    num_main = len(main[0])
    queries, chosen = rest[:num_main], rest[num_main:]
    _, seg_BS, q_offset = places
    keys = Set(chosen[0] if chosen else None, seg_Bt, seg_BS, q_offset + start)
    summed_Btx = kernels.target(keys, queries, main[1], lse)
    scores_Btx = kernels.scores(keys, q_idx, index[1], w_idx)
    return Distributions.of(summed_Btx, scores_Btx, keys.mask()), keys
