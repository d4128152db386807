"""Which tiles of keys a tile of queries can see, and which of them it sees whole."""

import jax
import jax.numpy as jnp

# Columns of a table of spans.
FIRST, END, FULL_FIRST, FULL_END, OFFSET = range(5)
NUM = 5


def spans(
    seg_q_BT: jax.Array, seg_k_BS: jax.Array, q_offset: jax.Array, tiles: tuple[int, int],
    causal: bool, by_key: bool = False, never_full: bool = False,
) -> jax.Array:  # fmt: skip
    """Spans of tiles of keys for each tile of queries, or with `by_key` the other way round.

    A pair of tiles meets if the ranges of their documents overlap and (causal) a key is not after
    every query; it is full if no pair of positions in it is hidden.

    Args:
      seg_q_BT, seg_k_BS: documents, 0 = padding, lengths that are multiples of the tiles.
      q_offset: position of the first query among the keys, int32.
      tiles: queries and keys of a tile.
      never_full: pairs are hidden by more than documents and order.
    Returns:
      int32 [B, tiles, 5]. Tiles that meet lie in FIRST..END, those of FULL_FIRST..FULL_END are
      full; the rest of the span may hold some that do not meet. OFFSET repeats `q_offset`.
    """
    (low_q, real_q, high_q), (low_k, real_k, high_k) = (
        _ranges(seg, size) for seg, size in zip((seg_q_BT, seg_k_BS), tiles, strict=True)
    )
    meets = _pairs(jnp.less_equal, real_q, high_k) & _pairs(jnp.greater_equal, high_q, real_k)
    one = (low_q == high_q) & (low_q > 0)
    full = one[:, :, None] & _pairs(jnp.equal, low_q, low_k) & _pairs(jnp.equal, low_q, high_k)
    if causal:
        first_q, first_k = (
            size * jnp.arange(num, dtype=jnp.int32)
            for size, num in zip(tiles, meets.shape[1:], strict=True)
        )
        first_q, first_k = first_q[:, None] + q_offset, first_k[None, :]
        meets &= first_k < first_q + tiles[0]
        full &= first_k + tiles[1] <= first_q + 1
    full &= not never_full
    if by_key:
        meets, full = jnp.swapaxes(meets, 1, 2), jnp.swapaxes(full, 1, 2)
    return _table(meets, full, q_offset)


def _ranges(seg_BX, size):
    """Of each tile: least id, least id that is not padding, largest id."""
    seg_Bix = seg_BX.reshape(seg_BX.shape[0], -1, size)
    nothing = jnp.iinfo(jnp.int32).max
    real = jnp.where(seg_Bix > 0, seg_Bix, nothing).min(2)
    return seg_Bix.min(2), real, jnp.maximum(seg_Bix.max(2), 0)


def _pairs(compare, a_Bi, b_Bj):
    return compare(a_Bi[:, :, None], b_Bj[:, None, :])


def _table(meets_Bij, full_Bij, q_offset):
    num = meets_Bij.shape[2]
    first_true = lambda x: jnp.argmax(x, 2).astype(jnp.int32)  # noqa: E731
    any_meets, any_full = meets_Bij.any(2), full_Bij.any(2)
    first = first_true(meets_Bij)
    end = jnp.where(any_meets, num - first_true(meets_Bij[..., ::-1]), first)
    full_first = jnp.where(any_full, first_true(full_Bij), first)
    later = jnp.arange(num, dtype=jnp.int32) >= full_first[..., None]
    broken = later & ~full_Bij
    full_end = jnp.where(broken.any(2), first_true(broken), num)
    full_end = jnp.where(any_full, full_end, full_first)
    offset = jnp.broadcast_to(q_offset.astype(jnp.int32), first.shape)
    columns = [first, end, full_first, full_end, offset]
    return jnp.stack(columns, axis=2).astype(jnp.int32)
