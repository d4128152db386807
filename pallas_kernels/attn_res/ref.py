"""The meaning of attn_res: normalise, score, softmax over sources, mix; differentiated by JAX."""

import jax
import jax.numpy as jnp


def attn_res(query_D, norm_weight_D, sources_XBTD, *, num_sources, eps):
    """Mix of the first `num_sources` sources."""
    acc = jnp.promote_types(jnp.float32, sources_XBTD.dtype)
    used_X = jnp.arange(sources_XBTD.shape[0]) < num_sources
    x_XBTD = jnp.where(used_X[:, None, None, None], sources_XBTD, 0).astype(acc)
    normed_XBTD = x_XBTD / jnp.sqrt(jnp.mean(x_XBTD**2, axis=-1, keepdims=True) + eps)
    weight_D = query_D.astype(acc) * norm_weight_D.astype(acc)
    logits_XBT = jnp.sum(normed_XBTD * weight_D, axis=-1)
    logits_XBT = jnp.where(used_X[:, None, None], logits_XBT, -jnp.inf)
    weights_XBT = jax.nn.softmax(logits_XBT, axis=0)
    return jnp.sum(weights_XBT[..., None] * x_XBTD, axis=0).astype(sources_XBTD.dtype)
