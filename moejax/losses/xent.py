"""Cross entropy from full logits: the reference, and the choice for small vocabularies."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32


def cross_entropy(
    logits: Float[Array, "*batch V"],
    labels: Int[Array, "*batch"],
    *,
    ignore: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """Summed cross entropy and the number of labels, in float32.

    With Z = log sum exp l:
        loss = Z - (1 - label_smoothing) l[label] - label_smoothing mean(l) + z_loss Z^2

    Args:
      logits: any floating dtype.
      labels: each `ignore` or in [0, V); already aligned with the logits.
      label_smoothing: in [0, 1).
      z_loss: factor of the squared log-partition.
    Returns:
      Sum over the labels that count, and how many they are.
    """
    logits = logits.astype(jnp.promote_types(jnp.float32, logits.dtype))
    valid = labels != ignore
    lse = jax.nn.logsumexp(logits, axis=-1)
    index = jnp.where(valid, labels, 0)[..., None]
    target = jnp.take_along_axis(logits, index, axis=-1)[..., 0]
    if label_smoothing:
        target += label_smoothing * (jnp.mean(logits, axis=-1) - target)
    losses = jnp.where(valid, lse - target + z_loss * lse**2, 0)
    return jnp.sum(losses), jnp.sum(valid, dtype=jnp.int32)


def mean_loss(loss_sum: Float[Array, ""], num_labels: Int[Array, ""]) -> Float[Array, ""]:
    """Loss per label; 0 where no label counts."""
    return loss_sum / jnp.maximum(num_labels, 1).astype(loss_sum.dtype)
