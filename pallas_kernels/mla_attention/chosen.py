"""Chosen keys as one bit a pair, which kernels read in place of a list for every query."""

import jax
import jax.numpy as jnp

BITS = 32


def pack(indices_BTJ: jax.Array, num_queries: int, num_keys: int) -> jax.Array:
    """Bit s % 32 of word [b, s // 32, t] tells whether s is among the indices of query t.

    Args:
      indices_BTJ: distinct for a query; negative ones are nothing.
      num_queries, num_keys: lengths with padding, the latter a multiple of 32.
    Returns:
      int32 [B, num_keys / 32, num_queries].
    """
    num_words = num_keys // BITS
    word = jnp.where(indices_BTJ < 0, num_words, indices_BTJ // BITS)
    bit = jnp.left_shift(jnp.int32(1), jnp.where(indices_BTJ < 0, 0, indices_BTJ % BITS))

    def of_row(word_TJ, bit_TJ):
        query_T1 = jnp.arange(word_TJ.shape[0], dtype=jnp.int32)[:, None]
        words = jnp.zeros((num_words, num_queries), jnp.int32)
        return words.at[word_TJ, query_T1].add(bit_TJ, mode="drop")

    return jax.vmap(of_row)(word.astype(jnp.int32), bit.astype(jnp.int32))
