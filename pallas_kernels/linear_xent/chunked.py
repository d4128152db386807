"""Cross entropy in chunks of rows and of the vocabulary; the gradient is formed in the forward."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from pallas_kernels.linear_xent.sizes import PART_COLUMNS, chunk_sizes


class _Options(NamedTuple):
    """All that is static."""

    ignore: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    vocab_axis: str | None
    rows: int
    vocab: int


class _Stats(NamedTuple):
    """Per row, over the vocabulary seen so far: online softmax, label's logit, sum of logits."""

    max: Array
    sum: Array
    label: Array
    total: Array


class _Block(NamedTuple):
    """Logits of some rows and a vocabulary slice; columns before `first` were in an earlier one."""

    logits: Array
    start: Array | int
    first: Array | int

    def only_new(self, value_nv, fill):
        """`value` with `fill` in the columns of an earlier block."""
        if isinstance(self.start, int):  # the first block of all
            return value_nv
        column_v = jnp.arange(self.logits.shape[1], dtype=jnp.int32) + self.start
        return jnp.where(column_v >= self.first, value_nv, jnp.asarray(fill, value_nv.dtype))

    def cut(self, c, size):
        """Part c of the block, at most `size` wide."""
        width = self.logits.shape[1]
        if size >= width:
            return self
        start = jnp.minimum(c * size, width - size)
        logits_nv = lax.dynamic_slice_in_dim(self.logits, start, size, axis=1)
        return _Block(logits_nv, start, c * size)


def linear_xent(
    x_MD,
    weight_VD,
    labels_M,
    *,
    ignore,
    label_smoothing,
    z_loss,
    soft_cap,
    rows_per_chunk,
    vocab_per_chunk,
    vocab_axis,
):
    """Sum of losses and number of labels; the package's README has the order of work."""
    rows, vocab = chunk_sizes(x_MD.shape[0], weight_VD.shape[0], rows_per_chunk, vocab_per_chunk)
    options = _Options(ignore, label_smoothing, z_loss, soft_cap, vocab_axis, rows, vocab)
    num_labels = jnp.sum(labels_M != ignore, dtype=jnp.int32)
    return _loss_sum(options, x_MD, weight_VD, labels_M.astype(jnp.int32)), num_labels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(options, x_MD, weight_VD, labels_M):
    return _all_rows(options, x_MD, weight_VD, labels_M, want_x=False, want_weight=False)[0]


def _loss_sum_fwd(options, x_MD, weight_VD, labels_M):
    # a frozen head is not `perturbed`: then its gradient, the third product, is never formed
    want = {"want_x": x_MD.perturbed, "want_weight": weight_VD.perturbed}
    arrays = x_MD.value, weight_VD.value, labels_M.value
    loss, d_x_MD, d_weight_VD = _all_rows(options, *arrays, **want)
    like_weight = jnp.zeros((0,), weight_VD.value.dtype)  # carries the dtype to the backward
    return loss, (d_x_MD, d_weight_VD, like_weight)


def _loss_sum_bwd(options, residuals, d_loss):
    d_x_MD, d_weight_VD, like_weight = residuals
    if isinstance(d_loss, SymbolicZero):
        return None, None, None
    if options.vocab_axis is not None:
        # every shard's loss depends on this shard's logits: what psum's own transpose would add
        d_loss = lax.psum(d_loss, options.vocab_axis)
    if d_x_MD is not None:
        d_x_MD = (d_x_MD.astype(d_loss.dtype) * d_loss).astype(d_x_MD.dtype)
    if d_weight_VD is not None:
        d_weight_VD = (d_weight_VD * d_loss).astype(like_weight.dtype)
    return d_x_MD, d_weight_VD, None


_loss_sum.defvjp(_loss_sum_fwd, _loss_sum_bwd, symbolic_zeros=True)


def _all_rows(options, x_MD, weight_VD, labels_M, *, want_x, want_weight):
    """Loss, and its gradients where wanted (else None), over chunks of rows."""
    num_rows, rows = x_MD.shape[0], options.rows
    acc = _acc_dtype(x_MD, weight_VD)
    d_weight_VD = jnp.zeros(weight_VD.shape, acc) if want_weight else None

    def one_chunk(x_nD, labels_n, d_weight_VD):
        return _row_chunk(options, weight_VD, x_nD, labels_n, d_weight_VD, want_x=want_x)

    if rows == num_rows:
        return one_chunk(x_MD, labels_M, d_weight_VD)
    num_chunks = -(-num_rows // rows)
    missing = num_chunks * rows - num_rows
    x_GnD = jnp.pad(x_MD, ((0, missing), (0, 0))).reshape(num_chunks, rows, -1)
    labels_Gn = jnp.pad(labels_M, (0, missing), constant_values=options.ignore)
    labels_Gn = labels_Gn.reshape(num_chunks, rows)

    def step(carry, chunk):
        loss, d_weight_VD = carry
        x_nD, labels_n = chunk
        chunk_loss, d_x_nD, d_weight_VD = one_chunk(x_nD, labels_n, d_weight_VD)
        return (loss + chunk_loss, d_weight_VD), d_x_nD

    init = jnp.zeros((), acc), d_weight_VD
    (loss, d_weight_VD), d_x_GnD = lax.scan(step, init, (x_GnD, labels_Gn))
    d_x_MD = d_x_GnD.reshape(-1, x_MD.shape[1])[:num_rows] if want_x else None
    return loss, d_x_MD, d_weight_VD


def _row_chunk(options, weight_VD, x_nD, labels_n, d_weight_VD, *, want_x):
    """Loss of some rows, its gradient to them, and d_weight with their share added."""
    valid_n = labels_n != options.ignore
    # ignored rows may hold anything, NaN included, and must not meet the sum over rows in d_weight
    x_nD = jnp.where(valid_n[:, None], x_nD, jnp.zeros((), x_nD.dtype))
    if options.vocab_axis is not None:
        shard = lax.axis_index(options.vocab_axis).astype(labels_n.dtype)
        labels_n = labels_n - shard * weight_VD.shape[0]
    num_vocab, width = weight_VD.shape[0], options.vocab
    only = _block(options, x_nD, weight_VD, 0) if width == num_vocab else None

    def see(c, stats):
        block = only if only is not None else _block(options, x_nD, weight_VD, c)
        return _with_block(stats, block, labels_n)

    stats = _loop(-(-num_vocab // width), see, _no_stats(x_nD, weight_VD))
    stats = _over_shards(stats, options.vocab_axis)
    lse_n = stats.max + jnp.log(stats.sum)
    loss = jnp.sum(jnp.where(valid_n, _loss(options, stats, lse_n, num_vocab), 0))
    if not want_x and d_weight_VD is None:
        return loss, None, None

    # whole logits are still gone through in parts: d_weight then grows in place, without a second
    # [V, D] for the product that is added to it
    part = min(width, PART_COLUMNS)

    def push(c, carry):
        d_x_nD, d_weight_VD = carry
        if only is not None:
            block = only.cut(c, part)
        else:
            block = _block(options, x_nD, weight_VD, c)
        g_nv = _d_logits(options, block, lse_n, labels_n, valid_n, num_vocab)
        g_nv = g_nv.astype(jnp.promote_types(x_nD.dtype, weight_VD.dtype))
        if want_x:
            weight_vD = _slice(weight_VD, block.start, g_nv.shape[1])
            d_x_nD = d_x_nD + _dot(g_nv, weight_vD, (1, 0))
        if d_weight_VD is not None:
            d_weight_VD = _add_slice(d_weight_VD, _dot(g_nv, x_nD, (0, 0)), block.start)
        return d_x_nD, d_weight_VD

    d_x_nD = jnp.zeros(x_nD.shape, lse_n.dtype) if want_x else None
    num_parts = -(-num_vocab // (part if only is not None else width))
    d_x_nD, d_weight_VD = _loop(num_parts, push, (d_x_nD, d_weight_VD))
    return loss, d_x_nD.astype(x_nD.dtype) if want_x else None, d_weight_VD


def _loop(count, body, init):
    return body(0, init) if count == 1 else lax.fori_loop(0, count, body, init)


def _acc_dtype(x, weight):
    return jnp.promote_types(jnp.float32, jnp.promote_types(x.dtype, weight.dtype))


def _dot(a, b, contract):
    """Product over one dim of each, in the wider input dtype, summed in at least float32."""
    dtype, acc = jnp.promote_types(a.dtype, b.dtype), _acc_dtype(a, b)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=acc)


def _slice(weight_VD, start, size):
    if size == weight_VD.shape[0]:
        return weight_VD
    return lax.dynamic_slice_in_dim(weight_VD, start, size, axis=0)


def _add_slice(total_VD, part_vD, start):
    if part_vD.shape == total_VD.shape:
        return total_VD + part_vD
    new_vD = lax.dynamic_slice_in_dim(total_VD, start, part_vD.shape[0], axis=0) + part_vD
    return lax.dynamic_update_slice_in_dim(total_VD, new_vD, start, axis=0)


def _block(options, x_nD, weight_VD, c):
    """Logits of vocabulary chunk c. The last one moves up to stay inside, so no copy is padded."""
    whole = options.vocab == weight_VD.shape[0]
    first = 0 if whole else c * options.vocab
    start = 0 if whole else jnp.minimum(first, weight_VD.shape[0] - options.vocab)
    logits_nv = _dot(x_nD, _slice(weight_VD, start, options.vocab), (1, 1))
    if options.soft_cap is not None:
        logits_nv = options.soft_cap * jnp.tanh(logits_nv / options.soft_cap)
    return _Block(logits_nv, start, first)


def _no_stats(x_nD, weight_VD):
    zeros_n = jnp.zeros(x_nD.shape[:1], _acc_dtype(x_nD, weight_VD))
    return _Stats(zeros_n - jnp.inf, zeros_n, zeros_n, zeros_n)


def _with_block(stats, block, labels_n):
    """Merges a block into the running statistics."""
    logits_nv = block.only_new(block.logits, -jnp.inf)
    max_n = jnp.maximum(stats.max, jnp.max(logits_nv, axis=-1))
    sum_n = jnp.sum(jnp.exp(logits_nv - max_n[:, None]), axis=-1)
    column_n = labels_n - block.start
    width = block.logits.shape[1]
    here_n = (column_n >= block.first - block.start) & (column_n < width)
    picked_n1 = jnp.take_along_axis(
        block.logits, jnp.clip(column_n, 0, width - 1)[:, None], axis=-1
    )
    return _Stats(
        max=max_n,
        sum=stats.sum * jnp.exp(stats.max - max_n) + sum_n,
        label=stats.label + jnp.where(here_n, picked_n1[:, 0], 0),
        total=stats.total + jnp.sum(block.only_new(block.logits, 0), axis=-1),
    )


def _over_shards(stats, vocab_axis):
    """Statistics over the whole vocabulary from those of each shard's part."""
    if vocab_axis is None:
        return stats
    max_n = lax.pmax(stats.max, vocab_axis)
    sums = stats.sum * jnp.exp(stats.max - max_n), stats.label, stats.total
    return _Stats(max_n, *lax.psum(sums, vocab_axis))


def _num_vocab(options, num_local):
    return num_local if options.vocab_axis is None else lax.psum(num_local, options.vocab_axis)


def _loss(options, stats, lse_n, num_local):
    target_n = stats.label
    if options.label_smoothing:
        mean_n = stats.total / _num_vocab(options, num_local)
        target_n = target_n + options.label_smoothing * (mean_n - target_n)
    return lse_n - target_n + options.z_loss * lse_n**2


def _d_logits(options, block, lse_n, labels_n, valid_n, num_local):
    """Gradient of the loss to the raw logits of a block; 0 in ignored rows and repeated columns."""
    p_nv = jnp.exp(block.logits - lse_n[:, None])
    # z_loss * lse^2 has the softmax as its gradient too
    g_nv = p_nv * (1 + 2 * options.z_loss * lse_n)[:, None]
    column_v = jnp.arange(p_nv.shape[1], dtype=jnp.int32) + block.start
    is_label_nv = column_v == labels_n[:, None]
    g_nv = g_nv - jnp.where(is_label_nv, 1 - options.label_smoothing, 0).astype(g_nv.dtype)
    if options.label_smoothing:
        g_nv = g_nv - options.label_smoothing / _num_vocab(options, num_local)
    if options.soft_cap is not None:
        g_nv = g_nv * (1 - (block.logits / options.soft_cap) ** 2)
    return block.only_new(jnp.where(valid_n[:, None], g_nv, 0), 0)
