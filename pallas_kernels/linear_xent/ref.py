"""The meaning of linear_xent: all logits at once, differentiated by JAX."""

import jax
import jax.numpy as jnp
from jax import lax


def linear_xent(
    x_MD,
    weight_VD,
    labels_M,
    *,
    ignore,
    label_smoothing,
    z_loss,
    soft_cap,
    rows_per_chunk=None,
    vocab_per_chunk=None,
    vocab_axis=None,
):
    """Sum of the losses of the labels that count, and their number. Chunk sizes play no part."""
    del rows_per_chunk, vocab_per_chunk
    acc = jnp.promote_types(jnp.float32, jnp.promote_types(x_MD.dtype, weight_VD.dtype))
    valid_M = labels_M != ignore
    x_MD = jnp.where(valid_M[:, None], x_MD, 0).astype(acc)
    logits_MV = jnp.matmul(x_MD, weight_VD.astype(acc).T, precision="highest")
    if soft_cap is not None:
        logits_MV = soft_cap * jnp.tanh(logits_MV / soft_cap)
    num_local = weight_VD.shape[0]
    offset = 0 if vocab_axis is None else lax.axis_index(vocab_axis) * num_local
    max_M = lax.stop_gradient(_over(lax.pmax, jnp.max(logits_MV, axis=-1), vocab_axis))
    sum_M = _over(lax.psum, jnp.sum(jnp.exp(logits_MV - max_M[:, None]), axis=-1), vocab_axis)
    lse_M = max_M + jnp.log(sum_M)
    onehot_MV = jax.nn.one_hot(labels_M - offset, num_local, dtype=acc)
    label_M = _over(lax.psum, jnp.sum(logits_MV * onehot_MV, axis=-1), vocab_axis)
    num_vocab = _over(lax.psum, num_local, vocab_axis)
    mean_M = _over(lax.psum, jnp.sum(logits_MV, axis=-1), vocab_axis) / num_vocab
    target_M = (1 - label_smoothing) * label_M + label_smoothing * mean_M
    loss_M = lse_M - target_M + z_loss * lse_M**2
    return jnp.sum(jnp.where(valid_M, loss_M, 0)), jnp.sum(valid_M, dtype=jnp.int32)


def _over(collective, value, vocab_axis):
    return value if vocab_axis is None else collective(value, vocab_axis)
