"""Cross entropy under a head that is never whole on a device: gathered piece by piece.

Rows go in chunks, and for each chunk the vocabulary passes in pieces of the head, which every
device gathers, uses and drops. The logits are made twice, for the sums and for the gradient: four
products where a whole head takes three, and the head is gathered twice a chunk of rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from moejax.partitioning import BATCH_AXES, active_mesh, stored_layout
from moejax.partitioning.shard import gathered
from moejax.typing import Array, Float, Int


class _How(NamedTuple):
    """All that is static: sizes of a chunk, the head's layout, factor of Z^2, dtype of products."""

    rows: int
    vocab: int
    layout: P
    z_loss: float
    dtype: Any


def sharded_head_loss(
    x_MD: Float[Array, "M D"], table_VD: Float[Array, "V D"], labels_M: Int[Array, " M"],
    axes: tuple[str | None, ...], *, rows: int, vocab: int, z_loss: float = 0.0,
) -> Float[Array, ""]:  # fmt: skip
    """`sum(Z - l[label] + z_loss Z^2)` over all rows, with l = x table', Z = log sum exp l.

    Args:
      x_MD: rows over the batch's mesh axes; the compute dtype.
      table_VD: the head as it is stored, in any floating dtype; cast to x's piece by piece.
      labels_M: each negative (no label) or in [0, V).
      axes: logical axes of the head.
      rows: of a device, handled at once.
      vocab: entries of the head that are whole on a device at once.
      z_loss: factor of the squared log-partition.
    Returns:
      float32 scalar. Products in x's dtype, sums in float32.
    """
    mesh = active_mesh()
    rows, vocab = max(1, rows), max(1, min(vocab, table_VD.shape[0]))
    if mesh is None:
        return _loss(_How(rows, vocab, P(), z_loss, x_MD.dtype), x_MD, table_VD, labels_M)
    layout = stored_layout(axes, table_VD.shape, dict(mesh.shape))
    how = _How(rows, vocab, layout, z_loss, x_MD.dtype)
    run = jax.shard_map(
        lambda x, table, labels: _loss(how, x, table, labels)[None],
        in_specs=(P(BATCH_AXES), layout, P(BATCH_AXES)), out_specs=P(BATCH_AXES), check_vma=False,
    )  # fmt: skip
    return jnp.sum(run(x_MD, table_VD, labels_M))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(how: _How, x_MD: Array, part_VD: Array, labels_M: Array) -> Array:
    return _sums(how, x_MD, part_VD, labels_M)[0]


def _loss_fwd(how: _How, x_MD: Any, part_VD: Any, labels_M: Any):
    loss, lse_M = _sums(how, x_MD.value, part_VD.value, labels_M.value)
    wanted = [() if given.perturbed else None for given in (x_MD, part_VD)]
    return loss, (x_MD.value, part_VD.value, labels_M.value, lse_M, wanted)


def _loss_bwd(how: _How, residuals, d_loss):
    x_MD, part_VD, labels_M, lse_M, wanted = residuals
    if isinstance(d_loss, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    want_x, want_head = (one is not None for one in wanted)
    d_part_VD = jnp.zeros(part_VD.shape, jnp.float32) if want_head else None

    def chunk(d_part_VD, one):
        x_nD, labels_n, lse_n = one
        x_nD = jnp.where((labels_n >= 0)[:, None], x_nD, jnp.zeros((), x_nD.dtype))
        d_x_nD = jnp.zeros(x_nD.shape, jnp.float32) if want_x else None
        push = functools.partial(_push, how, part_VD, x_nD, labels_n, lse_n, d_loss)
        d_x_nD, d_part_VD = _over_pieces(how, part_VD, push, (d_x_nD, d_part_VD))
        return d_part_VD, d_x_nD.astype(x_nD.dtype) if want_x else None

    d_part_VD, d_x_MD = _over_rows(how, chunk, d_part_VD, (x_MD, labels_M, lse_M))
    return d_x_MD, d_part_VD.astype(part_VD.dtype) if want_head else None, None


_loss.defvjp(_loss_fwd, _loss_bwd, symbolic_zeros=True)


def _sums(how: _How, x_MD: Array, part_VD: Array, labels_M: Array) -> tuple[Array, Array]:
    """The loss of all rows and each row's Z."""

    def chunk(loss, one):
        x_nD, labels_n = one
        # A row without a label may hold anything, NaN included.
        x_nD = jnp.where((labels_n >= 0)[:, None], x_nD, jnp.zeros((), x_nD.dtype))
        lowest_n, zeros_n = (jnp.full(labels_n.shape, v, jnp.float32) for v in (-jnp.inf, 0))

        def see(piece_vD, start, first, stats):
            logits_nv, column_nv = _logits(x_nD, piece_vD, start, first)
            max_n = jnp.maximum(stats[0], jnp.max(logits_nv, axis=-1))
            sum_n = jnp.sum(jnp.exp(logits_nv - max_n[:, None]), axis=-1)
            here_nv = (column_nv == labels_n[:, None]) & (column_nv >= first)
            picked_n = jnp.sum(jnp.where(here_nv, logits_nv, 0), axis=-1)
            return max_n, stats[1] * jnp.exp(stats[0] - max_n) + sum_n, stats[2] + picked_n

        max_n, sum_n, label_n = _over_pieces(how, part_VD, see, (lowest_n, zeros_n, zeros_n))
        lse_n = max_n + jnp.log(sum_n)
        losses_n = lse_n - label_n + how.z_loss * lse_n**2
        return loss + jnp.sum(jnp.where(labels_n >= 0, losses_n, 0)), lse_n

    return _over_rows(how, chunk, jnp.float32(0), (x_MD, labels_M))


def _push(how: _How, part_VD, x_nD, labels_n, lse_n, d_loss, piece_vD, start, first, carry):
    """Adds one piece's share to the gradients of a chunk of rows and of the head."""
    d_x_nD, d_part_VD = carry
    logits_nv, column_nv = _logits(x_nD, piece_vD, start, first)
    p_nv = jnp.exp(logits_nv - lse_n[:, None]) * (1 + 2 * how.z_loss * lse_n)[:, None]
    g_nv = p_nv - (column_nv == labels_n[:, None]).astype(jnp.float32)
    # A column of the piece before, or a row without a label, has no gradient.
    counts_nv = (labels_n >= 0)[:, None] & (column_nv >= first)
    g_nv = jnp.where(counts_nv, g_nv * d_loss, 0).astype(x_nD.dtype)
    if d_x_nD is not None:
        d_x_nD = d_x_nD + _dot(g_nv, piece_vD, (1, 0))
    if d_part_VD is not None:
        stored = jax.lax.dynamic_slice_in_dim(part_VD, start, how.vocab).astype(jnp.float32)
        scatter = jax.linear_transpose(lambda p: gathered(p, how.layout), stored)
        (d_vD,) = scatter(_dot(g_nv, x_nD, (0, 0)))
        d_vD += jax.lax.dynamic_slice_in_dim(d_part_VD, start, how.vocab)
        d_part_VD = jax.lax.dynamic_update_slice_in_dim(d_part_VD, d_vD, start, 0)
    return d_x_nD, d_part_VD


def _logits(x_nD, piece_vD, start, first) -> tuple[Array, Array]:
    """Logits of a piece, float32, -inf in columns of the piece before; and the columns' numbers."""
    logits_nv = _dot(x_nD, piece_vD, (1, 1))
    column_nv = jax.lax.broadcasted_iota(jnp.int32, logits_nv.shape, 1) + start
    return jnp.where(column_nv >= first, logits_nv, -jnp.inf), column_nv


def _dot(a: Array, b: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _over_pieces(how: _How, part_VD: Array, see, carry):
    """`see(piece_vD, start, first, carry)` for each piece of the head, whole and in x's dtype.

    The last one moves up to stay inside; its columns before `first` were in the one before it.
    """
    num_vocab = part_VD.shape[0]

    def one(number, carry):
        first = jnp.asarray(number * how.vocab, jnp.int32)
        start = jnp.minimum(first, num_vocab - how.vocab)
        piece_vd = jax.lax.dynamic_slice_in_dim(part_VD, start, how.vocab)
        return see(gathered(piece_vd.astype(how.dtype), how.layout), start, first, carry)

    count = -(-num_vocab // how.vocab)
    return one(0, carry) if count == 1 else jax.lax.fori_loop(0, count, one, carry)


def _over_rows(how: _How, chunk, carry, arrays):
    """`chunk(carry, arrays of some rows)` for all rows; rows of padding have no label."""
    num_rows, rows = arrays[0].shape[0], min(how.rows, arrays[0].shape[0])
    count = -(-num_rows // rows)
    if count == 1:
        return chunk(carry, arrays)
    x_MD, labels_M, *rest = arrays
    missing = count * rows - num_rows
    padded = [
        jnp.pad(x_MD, ((0, missing), (0, 0))),
        jnp.pad(labels_M, (0, missing), constant_values=-1),
        *(jnp.pad(one_M, (0, missing)) for one_M in rest),
    ]
    carry, out = jax.lax.scan(chunk, carry, [a.reshape(count, rows, *a.shape[1:]) for a in padded])
    return carry, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:num_rows], out)
