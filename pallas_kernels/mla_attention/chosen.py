"""Chosen keys as one bit a pair, which kernels read in place of a list for every query."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import chosen_mask, limit_by_bytes, pad_dim1, scan_queries

BITS = 32
# Bytes of a sequence's pairs that exist at a time, one each, before they become bits.
_BUDGET = 64 << 20


def pack(indices_BTJ: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Bit s % 32 of word [b, s // 32, t] tells whether s is among the indices of query t.

    Pairs are marked before they become bits: a key that is given twice would add its bit twice,
    which is its neighbour's.

    Args:
      indices_BTJ: those that are negative, or not below `num_keys`, are nothing.
      num_queries, num_keys: lengths with padding, the latter a multiple of 32.
    Returns:
      int32 [B, num_keys / 32, num_queries].
    """
    place_b = jnp.arange(BITS, dtype=jnp.uint32)

    def of_queries(carry, start, blocks):
        mask_BtS = chosen_mask(blocks[0], num_keys)
        bits_BtWb = mask_BtS.reshape(*mask_BtS.shape[:2], -1, BITS).astype(jnp.uint32)
        return carry, (jnp.sum(bits_BtWb << place_b, axis=-1, dtype=jnp.uint32),)

    limit = limit_by_bytes(num_keys, _BUDGET, num_queries)
    xs = (pad_dim1(indices_BTJ, num_queries),)
    words_BTW = scan_queries(of_queries, None, xs, limit)[1][0]
    return lax.bitcast_convert_type(jnp.swapaxes(words_BTW, 1, 2), jnp.int32)
