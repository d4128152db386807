"""linear_xent whose logits never leave a multiprocessor: tiles of them are formed twice.

The forward keeps one number a row, its log-partition. The backward forms each tile of logits again,
turns it into its gradient and adds that tile's share to dx and to dW in float32, in memory.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.linear_xent.pallas_gpu_bodies import Sizes, grad_body, stats_body
from pallas_kernels.linear_xent.tiles import tiles_for


class _Options(NamedTuple):
    """All that is static."""

    ignore: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None


def linear_xent(
    x_MD, weight_VD, labels_M, *, ignore, label_smoothing, z_loss, soft_cap, rows_per_chunk,
    vocab_per_chunk, vocab_axis,
):  # fmt: skip
    """Sum of losses and number of labels; chunk sizes play no part, as there are no chunks."""
    del rows_per_chunk, vocab_per_chunk
    if vocab_axis is not None:
        raise NotImplementedError("the kernel sees one device's vocabulary; it is split over more")
    if x_MD.dtype != weight_VD.dtype or x_MD.dtype == jnp.float64:
        raise NotImplementedError(
            f"x is {x_MD.dtype}, weight {weight_VD.dtype}: the kernel takes both in one dtype, "
            "bfloat16, float16 or float32"
        )
    if 0 in x_MD.shape or 0 in weight_VD.shape:
        raise NotImplementedError("an empty array needs no kernel")
    options = _Options(ignore, label_smoothing, z_loss, soft_cap)
    num_labels = jnp.sum(labels_M != ignore, dtype=jnp.int32)
    return _loss_sum(options, x_MD, weight_VD, labels_M.astype(jnp.int32)), num_labels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss_sum(options, x_MD, weight_VD, labels_M):
    return _forward(options, x_MD, weight_VD, labels_M)[0]


def _loss_sum_fwd(options, x_MD, weight_VD, labels_M):
    arrays = x_MD.value, weight_VD.value, labels_M.value
    loss, lse_M = _forward(options, *arrays)
    # a frozen head is not `perturbed`: then its gradient is never formed
    wanted = tuple(jnp.zeros(()) if a.perturbed else None for a in (x_MD, weight_VD))
    return loss, (*arrays, lse_M, wanted)


def _loss_sum_bwd(options, residuals, d_loss):
    x_MD, weight_VD, labels_M, lse_M, wanted = residuals
    if isinstance(d_loss, SymbolicZero) or wanted == (None, None):
        return None, None, None
    want_x, want_weight = (w is not None for w in wanted)
    d_x_MD, d_weight_VD = _backward(
        options, x_MD, weight_VD, labels_M, lse_M, want_x=want_x, want_weight=want_weight
    )
    scaled = lambda grad, like: (grad * d_loss).astype(like.dtype)  # noqa: E731
    return (
        scaled(d_x_MD, x_MD) if want_x else None,
        scaled(d_weight_VD, weight_VD) if want_weight else None,
        None,
    )


_loss_sum.defvjp(_loss_sum_fwd, _loss_sum_bwd, symbolic_zeros=True)


def _sizes(options, x_MD, weight_VD):
    (num_rows, width), num_vocab = x_MD.shape, weight_VD.shape[0]
    return Sizes(tiles_for(num_rows, num_vocab, width), num_rows, num_vocab, width, *options)


def _whole(array):
    """A block that is all of the array, where it lies."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))


def _forward(options, x_MD, weight_VD, labels_M):
    """Loss, and the log-partition of every row."""
    sizes = _sizes(options, x_MD, weight_VD)
    splits, num_rows = sizes.tiles.splits, sizes.num_rows
    given = (x_MD, weight_VD, labels_M)
    out = [jax.ShapeDtypeStruct((splits, num_rows), jnp.float32) for _ in range(4)]
    max_SM, sum_SM, label_SM, total_SM = _gpu.call(
        functools.partial(stats_body, sizes), name="xent_stats",
        # a GPU counts the first axis up first: programs side by side share a part of the weight
        grid=(sizes.row_tiles, splits), in_specs=[_whole(a) for a in given],
        out_specs=[_whole(a) for a in out], out_shape=out, warps=sizes.tiles.warps,
        stages=sizes.tiles.stages,
    )(*given)  # fmt: skip
    max_M = jnp.max(max_SM, axis=0)
    lse_M = max_M + jnp.log(jnp.sum(sum_SM * jnp.exp(max_SM - max_M), axis=0))
    target_M = jnp.sum(label_SM, axis=0)
    if options.label_smoothing:
        mean_M = jnp.sum(total_SM, axis=0) / sizes.num_vocab
        target_M = target_M + options.label_smoothing * (mean_M - target_M)
    loss_M = lse_M - target_M + options.z_loss * lse_M**2
    return jnp.sum(jnp.where(labels_M != options.ignore, loss_M, 0)), lse_M


def _backward(options, x_MD, weight_VD, labels_M, lse_M, *, want_x, want_weight):
    """Gradients of the loss in float32, None where not wanted."""
    sizes = _sizes(options, x_MD, weight_VD)
    sizes = sizes._replace(tiles=sizes.tiles._replace(vocab=sizes.tiles.gradient_vocab))
    wanted = [a for a, want in ((x_MD, want_x), (weight_VD, want_weight)) if want]
    sums = [jnp.zeros(a.shape, jnp.float32) for a in wanted]
    given = (x_MD, weight_VD, labels_M, lse_M, *sums)
    out = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in sums]
    found = _gpu.call(
        functools.partial(grad_body, sizes, want_x, want_weight), name="xent_grad",
        grid=(sizes.row_tiles, sizes.vocab_tiles), in_specs=[_whole(a) for a in given],
        out_specs=[_whole(a) for a in out], out_shape=out, warps=sizes.tiles.warps,
        stages=sizes.tiles.stages, aliases={4 + i: i for i in range(len(sums))},
    )(*given)  # fmt: skip
    found = list(found)
    return found.pop(0) if want_x else None, found.pop(0) if want_weight else None
