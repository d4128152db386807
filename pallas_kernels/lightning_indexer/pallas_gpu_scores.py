"""Index scores of a block of queries on a GPU: a tile of all heads' products is never written."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.blocks import pad_dim1
from pallas_kernels.lightning_indexer.scores import ranked, weight_factor
from pallas_kernels.lightning_indexer.tiles import Tiles


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def round_up(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `n`."""
    return pl.cdiv(n, unit) * unit


def padded_heads(x: jax.Array, num_heads: int | None = None) -> jax.Array:
    """Lengthens the last dim to a power of two of at least 16 with zeros, and dim 2 likewise."""
    widths = [(0, 0)] * x.ndim
    widths[-1] = (0, power_of_two(x.shape[-1], 16) - x.shape[-1])
    if num_heads is not None:
        widths[2] = (0, num_heads - x.shape[2])
    return jnp.pad(x, widths) if any(extra for _, extra in widths) else x


def block_scores(
    q_BtUu: jax.Array, k_BSu: jax.Array, w_BtU: jax.Array, seg_Bt: jax.Array, seg_BS: jax.Array,
    first: jax.Array, tiles: Tiles,
) -> jax.Array:  # fmt: skip
    """Scores [B, t, S] in float32, as `ranked` makes them.

    Args:
      k_BSu, seg_BS: S is a multiple of the key tile.
      first: position of the block's first query among the keys.
    """
    B, t, U, u = q_BtUu.shape
    w_BtU = w_BtU.astype(jnp.float32) * weight_factor(U, u)
    few = t <= tiles.few
    num_heads = power_of_two(U, 16) if few else U
    length = t if few else round_up(t, tiles.query)
    q_BtUu = padded_heads(pad_dim1(q_BtUu, length), num_heads)
    w_BtU = jnp.pad(w_BtU, ((0, 0), (0, length - t), (0, num_heads - U)))
    w = w_BtU if few else w_BtU.swapaxes(1, 2)  # a head's weights of a tile lie together
    given = (
        jnp.asarray(first, jnp.int32).reshape(1), q_BtUu, padded_heads(k_BSu), w,
        pad_dim1(seg_Bt, length), seg_BS,
    )  # fmt: skip
    S = k_BSu.shape[1]
    whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,) * len(a.shape))  # noqa: E731
    out = jax.ShapeDtypeStruct((B, length, S), jnp.float32)
    block = _Block(1 if few else tiles.query, tiles.key, num_heads, U)
    scores_BtS = _gpu.call(
        functools.partial(_one_query if few else _tile, block),
        name="index_scores_few" if few else "index_scores",
        grid=(B, length // block.query, S // block.key), in_specs=[whole(a) for a in given],
        out_specs=whole(out), out_shape=out, warps=4 if few else tiles.warps, stages=tiles.stages,
    )(*given)  # fmt: skip
    return scores_BtS[:, :t]


class _Block(NamedTuple):
    """Sizes of a tile of scores."""

    query: int
    key: int
    num_heads: int
    real_heads: int  # the others, of zeros, fill the tile of a single query

    def places(self):
        """(batch, slice of queries, slice of keys) of this program."""
        rows = pl.ds(pl.program_id(1) * self.query, self.query)
        return pl.program_id(0), rows, pl.ds(pl.program_id(2) * self.key, self.key)

    def visible(self, first, seg_t, seg_s):
        """[t, s], and how many heads need be looked at: none where no key can be visible."""
        query = first + pl.program_id(1) * self.query
        key = pl.program_id(2) * self.key
        pos_t = query + jnp.arange(self.query, dtype=jnp.int32)
        pos_s = key + jnp.arange(self.key, dtype=jnp.int32)
        visible_ts = (seg_t[:, None] == seg_s[None, :]) & (seg_t > 0)[:, None]
        visible_ts &= pos_s[None, :] <= pos_t[:, None]
        some = (key < query + self.query) & (jnp.max(seg_s) >= jnp.min(seg_t))
        some &= jnp.min(seg_s) <= jnp.max(seg_t)
        return visible_ts, jnp.where(some, jnp.int32(self.num_heads), jnp.int32(0))


def _tile(block, first_ref, q_ref, k_ref, w_ref, seg_q_ref, seg_k_ref, out_ref):
    b, rows, columns = block.places()
    seg_t, seg_s = _gpu.load(seg_q_ref.at[b, rows]), _gpu.load(seg_k_ref.at[b, columns])
    visible_ts, num_heads = block.visible(first_ref[0], seg_t, seg_s)
    k_su = _gpu.load(k_ref.at[b, columns, :])

    def head(j, scores_ts):
        q_tu = _gpu.load(q_ref.at[b, rows, j, :])
        dots_ts = _gpu.dot(q_tu, k_su, trans_b=True, nearly_exact=True)
        w_t = _gpu.load(w_ref.at[b, j, rows])
        return scores_ts + w_t[:, None] * jnp.maximum(dots_ts, 0)

    scores_ts = jnp.zeros(visible_ts.shape, jnp.float32)
    scores_ts = lax.fori_loop(jnp.int32(0), num_heads, head, scores_ts)
    _gpu.store(out_ref.at[b, rows, columns], ranked(scores_ts, visible_ts))


def _one_query(block, first_ref, q_ref, k_ref, w_ref, seg_q_ref, seg_k_ref, out_ref):
    b, row, columns = block.places()
    t = pl.program_id(1)
    seg_t = _gpu.load(seg_q_ref.at[b, row])
    visible_ts, _ = block.visible(first_ref[0], seg_t, _gpu.load(seg_k_ref.at[b, columns]))
    q_Uu, k_su = _gpu.load(q_ref.at[b, t, :, :]), _gpu.load(k_ref.at[b, columns, :])
    dots_Us = _gpu.dot(q_Uu, k_su, trans_b=True, nearly_exact=True)
    # 0 times a key of inf is no number, in heads that are not there
    there_U = jnp.arange(block.num_heads, dtype=jnp.int32) < block.real_heads
    dots_Us = jnp.where(there_U[:, None], dots_Us, 0)
    w_U = _gpu.load(w_ref.at[b, t, :])
    scores_s = jnp.sum(w_U[:, None] * jnp.maximum(dots_Us, 0), axis=0)
    _gpu.store(out_ref.at[b, row, columns], ranked(scores_s[None, :], visible_ts))
