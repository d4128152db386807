"""Kernels of the sparse stage: a program has one query and fetches the rows it chose, some a time.

Slots behind the last chosen one are neither read nor written.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.indexer_kl.tiles import Tile
from pallas_kernels.lightning_indexer.pallas_gpu_scores import (
    padded_heads,
    power_of_two,
    round_up,
)
from pallas_kernels.lightning_indexer.scores import weight_factor

_LOG2_E = 1.4426950408889634


def target(keys, queries, rows, lse_BtN, *, scale: float, tile: Tile) -> jax.Array:
    """sum_n exp(z - lse) [B, t, J]; `queries` and `rows` are the parts of the main attention's."""
    B, t, N = lse_BtN.shape
    J = keys.indices.shape[2]
    sizes = _Sizes(t, rows[0].shape[1], N, min(tile.rows, power_of_two(N, 16)), tile.keys)
    indices, used = _slots(keys.indices, tile.keys)
    given = [
        used, indices, lse_BtN.reshape(-1),
        *(padded_heads(x).reshape(B * t * N, -1) for x in queries),
        *(padded_heads(x).reshape(B * sizes.num_rows, -1) for x in rows),
    ]  # fmt: skip
    num_tiles = pl.cdiv(N, sizes.heads)
    out = jax.ShapeDtypeStruct((B * num_tiles * t, indices.shape[2]), jnp.float32)
    summed = _call(
        functools.partial(_target_body, sizes, scale), "indexer_kl_target", (B, t, num_tiles),
        given, out, tile,
    ).reshape(B, t, num_tiles, -1)  # fmt: skip
    return jnp.sum(summed[..., :J], axis=2)


def scores(keys, q_BtUu, k_BSu, w_BtU, *, tile: Tile) -> jax.Array:
    """Index scores of the chosen keys, [B, t, J]."""
    B, t, U, _ = q_BtUu.shape
    sizes, given = _index_inputs(keys, q_BtUu, k_BSu, w_BtU, tile)
    out = jax.ShapeDtypeStruct((B * t, given[1].shape[2]), jnp.float32)
    found = _call(
        functools.partial(_scores_body, sizes), "indexer_kl_scores", (B, t), given, out, tile
    )
    return found.reshape(B, t, -1)[..., : keys.indices.shape[2]]


def gradients(keys, q_BtUu, k_BSu, w_BtU, dscores_BtJ, dk_BSu, *, tile: Tile):
    """(dq, dk, dw) in float32; dk is `dk_BSu` and what these queries add to it, atomically."""
    B, t, U, u = q_BtUu.shape
    sizes, given = _index_inputs(keys, q_BtUu, k_BSu, w_BtU, tile)
    length, width = given[1].shape[2], given[2].shape[-1]
    dscores = jnp.pad(dscores_BtJ, ((0, 0), (0, 0), (0, length - dscores_BtJ.shape[2])))
    dk = padded_heads(dk_BSu).reshape(-1, width)
    given += [dscores.reshape(B * t, length), dk]
    heads = sizes.heads
    out = [
        jax.ShapeDtypeStruct((B * t * heads, width), jnp.float32),
        jax.ShapeDtypeStruct((B * t, heads), jnp.float32),
        jax.ShapeDtypeStruct(dk.shape, jnp.float32),
    ]
    dq, dw, dk = _call(
        functools.partial(_gradients_body, sizes), "indexer_kl_grad", (B, t), given, out, tile,
        aliases={len(given) - 1: 2},
    )  # fmt: skip
    dq = dq.reshape(B, t, heads, width)[:, :, :U, :u]
    factor = weight_factor(U, u)
    return dq, dk.reshape(B, -1, width)[..., :u], factor * dw.reshape(B, t, heads)[..., :U]


class _Sizes(NamedTuple):
    """Queries of a block, rows of a batch, heads; heads and slots of a tile."""

    queries: int
    num_rows: int
    num_heads: int
    heads: int
    keys: int


class _Query:
    """A program's query; asked once which, as loops of the interpreter cannot."""

    def __init__(self, sizes, used_ref, indices_ref):
        self.sizes, self.indices_ref = sizes, indices_ref
        self.b, self.t = pl.program_id(0), pl.program_id(1)
        self.used = used_ref[self.b, self.t]
        self.place = self.b * sizes.queries + self.t  # among those of all batches

    def each(self, body, init):
        """`body(slots, carry)` for every tile of slots that has a chosen key."""
        size = self.sizes.keys
        step = lambda i, carry: body(pl.ds(i * size, size), carry)  # noqa: E731
        return lax.fori_loop(jnp.int32(0), (self.used + (size - 1)) // size, step, init)

    def rows(self, slots):
        """Rows of all batches that the slots name, and which slots name one."""
        index_j = _gpu.load(self.indices_ref.at[self.b, self.t, slots])
        return self.b * self.sizes.num_rows + jnp.maximum(index_j, 0), index_j >= 0


def _slots(indices, keys):
    """Indices in whole tiles, and [B, t], one past the last slot that has one."""
    extra = round_up(indices.shape[2], keys) - indices.shape[2]
    indices = jnp.pad(indices.astype(jnp.int32), ((0, 0), (0, 0), (0, extra)), constant_values=-1)
    place_J = jnp.arange(1, indices.shape[2] + 1, dtype=jnp.int32)
    return indices, jnp.max(jnp.where(indices >= 0, place_J, 0), axis=-1)


def _index_inputs(keys, q_BtUu, k_BSu, w_BtU, tile):
    """Sizes, and [used, indices, q of a row a head, k, w with the factor inside]."""
    B, t, U, u = q_BtUu.shape
    heads = power_of_two(U, 16)
    indices, used = _slots(keys.indices, tile.keys)
    w_BtU = w_BtU.astype(jnp.float32) * weight_factor(U, u)
    w_BtU = jnp.pad(w_BtU, ((0, 0), (0, 0), (0, heads - U)))
    q, k = padded_heads(q_BtUu, heads), padded_heads(k_BSu)
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    sizes = _Sizes(t, k_BSu.shape[1], U, heads, tile.keys)
    return sizes, [used, indices, q.reshape(B * t, heads, -1), flat(k), flat(w_BtU)]


def _call(body, name, grid, given, out, tile, aliases=None):
    whole = lambda a: pl.BlockSpec(a.shape, lambda *_: (0,) * len(a.shape))  # noqa: E731
    return _gpu.call(
        body, name=name, grid=grid, in_specs=[whole(a) for a in given],
        out_specs=jax.tree.map(whole, out), out_shape=out, warps=tile.warps, stages=tile.stages,
        aliases=aliases,
    )(*given)  # fmt: skip


def _target_body(sizes, scale, used_ref, indices_ref, lse_ref, *refs):
    q_refs, row_refs, out_ref = refs[: len(refs) // 2], refs[len(refs) // 2 : -1], refs[-1]
    query = _Query(sizes, used_ref, indices_ref)
    row = query.place * pl.cdiv(sizes.num_heads, sizes.heads) + pl.program_id(2)
    head_n = pl.program_id(2) * sizes.heads + jnp.arange(sizes.heads, dtype=jnp.int32)
    real_n, place_n = head_n < sizes.num_heads, query.place * sizes.num_heads + head_n
    place_n = jnp.where(real_n, place_n, 0)
    q_nC = [_gpu.load_rows(ref, place_n, real_n) for ref in q_refs]
    lse_n = _gpu.load(lse_ref.at[place_n]) * _LOG2_E

    def step(slots, _):
        row_j, chosen_j = query.rows(slots)
        z_nj = sum(
            _gpu.dot(q, _gpu.load_rows(ref, row_j), trans_b=True, nearly_exact=True)
            for q, ref in zip(q_nC, row_refs, strict=True)
        )
        p_nj = jnp.exp2(z_nj * (scale * _LOG2_E) - lse_n[:, None])
        p_nj = jnp.where(real_n[:, None] & chosen_j[None, :], p_nj, 0)
        _gpu.store(out_ref.at[row, slots], jnp.sum(p_nj, axis=0))

    query.each(step, None)


def _scores_body(sizes, used_ref, indices_ref, q_ref, k_ref, w_ref, out_ref):
    query = _Query(sizes, used_ref, indices_ref)
    q_Uu, w_U = _gpu.load(q_ref.at[query.place, :, :]), _gpu.load(w_ref.at[query.place, :])

    def step(slots, _):
        row_j, _ = query.rows(slots)
        dots_Uj = _gpu.dot(q_Uu, _gpu.load_rows(k_ref, row_j), trans_b=True, nearly_exact=True)
        score_j = jnp.sum(w_U[:, None] * jnp.maximum(dots_Uj, 0), axis=0)
        _gpu.store(out_ref.at[query.place, slots], score_j)

    query.each(step, None)


def _gradients_body(
    sizes, used_ref, indices_ref, q_ref, k_ref, w_ref, dscores_ref, _, dq_ref, dw_ref, dk_ref
):
    query = _Query(sizes, used_ref, indices_ref)
    q_Uu, w_U = _gpu.load(q_ref.at[query.place, :, :]), _gpu.load(w_ref.at[query.place, :])
    low = q_Uu.dtype

    def step(slots, carry):
        dq_Uu, dw_U = carry
        row_j, chosen_j = query.rows(slots)
        ds_j = jnp.where(chosen_j, _gpu.load(dscores_ref.at[query.place, slots]), 0)
        k_ju = _gpu.load_rows(k_ref, row_j)
        dots_Uj = _gpu.dot(q_Uu, k_ju, trans_b=True, nearly_exact=True)
        positive_Uj = (dots_Uj > 0) & chosen_j[None, :]
        dw_U += jnp.sum(jnp.where(positive_Uj, dots_Uj * ds_j[None, :], 0), axis=1)
        ddots_Uj = jnp.where(positive_Uj, w_U[:, None] * ds_j[None, :], 0).astype(low)
        update_ju = _gpu.dot(ddots_Uj, q_Uu, trans_a=True, nearly_exact=True)
        _gpu.add_rows(dk_ref, row_j, update_ju, chosen_j)
        # a row that no slot names may hold anything
        k_ju = jnp.where(chosen_j[:, None], k_ju, 0)
        return dq_Uu + _gpu.dot(ddots_Uj, k_ju, nearly_exact=True), dw_U

    init = jnp.zeros(q_Uu.shape, jnp.float32), jnp.zeros(w_U.shape, jnp.float32)
    dq_Uu, dw_U = query.each(step, init)
    _gpu.store(dq_ref.at[pl.ds(query.place * sizes.heads, sizes.heads), :], dq_Uu)
    _gpu.store(dw_ref.at[query.place, :], dw_U)
