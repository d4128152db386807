"""indexer_kl on GPUs: three kernels for each stage, run by blocks of queries."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer_kl import blockwise, pallas_gpu_chosen, pallas_gpu_dense
from pallas_kernels.indexer_kl.tiles import Tiles, tiles_for
from pallas_kernels.lightning_indexer.pallas_gpu_scores import power_of_two

_MAX_HEADS = 128


def indexer_kl(
    q_idx, k_idx, w_idx, q_latent, q_rope, latent, k_rope, lse, indices, places, *, scale
):
    """See api.py."""
    for x in (q_idx, latent):
        if x.dtype not in (jnp.bfloat16, jnp.float32):
            raise NotImplementedError(f"{x.dtype} has no kernel")
    if 0 in (*q_idx.shape, *k_idx.shape, *q_latent.shape):
        raise NotImplementedError("an empty array needs no kernel")
    if max(power_of_two(latent.shape[-1]), power_of_two(k_idx.shape[-1])) > 512:
        raise NotImplementedError("rows wider than 512 do not fit a program")
    if q_idx.shape[2] > _MAX_HEADS:
        raise NotImplementedError(f"{q_idx.shape[2]} indexer heads are more than {_MAX_HEADS}")
    if indices is not None:
        indices = jnp.where((places[0] > 0)[..., None], indices.astype(jnp.int32), -1)
    # parts of width 0 take no product
    parts = [(q, rows) for q, rows in ((q_latent, latent), (q_rope, k_rope)) if rows.shape[-1]]
    main = lax.stop_gradient(tuple(zip(*parts, strict=True)))
    itemsize = max(q_idx.dtype.itemsize, latent.dtype.itemsize)
    kernels = _kernels(float(scale), indices is not None, tiles_for(itemsize))
    index, lse = (q_idx, k_idx, w_idx), lax.stop_gradient(lse.astype(jnp.float32))
    return blockwise.kl(kernels, index, main, lse, indices, places)


@functools.cache  # one object for the same settings, so that JAX traces once
def _kernels(scale: float, sparse: bool, tiles: Tiles) -> blockwise.Kernels:
    limit = functools.partial(_limit, tiles)
    if sparse:
        part = pallas_gpu_chosen
        return blockwise.Kernels(
            functools.partial(part.target, scale=scale, tile=tiles.target),
            functools.partial(part.scores, tile=tiles.chosen),
            functools.partial(part.gradients, tile=tiles.chosen_grad), limit,
        )  # fmt: skip
    dense = pallas_gpu_dense
    return blockwise.Kernels(
        functools.partial(dense.target, scale=scale, tile=tiles.dense_target), dense.scores,
        functools.partial(
            dense.gradients, tile_q=tiles.dq, tile_k=tiles.dk, programs=tiles.programs
        ),
        limit,
    )  # fmt: skip


def _limit(tiles: Tiles, batch: int, num_keys: int, chosen: bool) -> int:
    """Most queries of a block: a power of two, as lengths of rows often are."""
    queries = min(tiles.block_bytes // (4 * batch * num_keys), tiles.block_queries)
    return max(8 if chosen else tiles.dense_target.rows, 1 << (max(queries, 1).bit_length() - 1))
