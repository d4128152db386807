"""attn_res that keeps only its arguments: the backward scores the sources again."""

import functools

import jax
import jax.numpy as jnp


def attn_res(query_D, norm_weight_D, sources_XBTD, *, num_sources, eps):
    """Mix over depth. A Python `num_sources` cuts the sources, a traced one masks them."""
    if isinstance(num_sources, int):
        sources_XBTD, num_sources = sources_XBTD[:num_sources], None
    return _mix(eps, query_D, norm_weight_D, sources_XBTD, num_sources)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(eps, query_D, norm_weight_D, sources_XBTD, num_sources):
    x_XBTD = _used(sources_XBTD, num_sources)
    _, _, weights_XBT = scores(query_D, norm_weight_D, x_XBTD, num_sources, eps)
    return weighted_sum(weights_XBT, x_XBTD).astype(sources_XBTD.dtype)


def _mix_fwd(eps, *arguments):
    return _mix(eps, *arguments), arguments


def _mix_bwd(eps, arguments, d_mix_BTD):
    query_D, norm_weight_D, sources_XBTD, num_sources = arguments
    x_XBTD = _used(sources_XBTD, num_sources)
    inv_rms_XBT, logits_XBT, weights_XBT = scores(query_D, norm_weight_D, x_XBTD, num_sources, eps)
    acc = logits_XBT.dtype
    fused_D = query_D.astype(acc) * norm_weight_D.astype(acc)
    d_mix_BTD = d_mix_BTD.astype(acc)
    d_weights_XBT = jnp.sum(x_XBTD.astype(acc) * d_mix_BTD, axis=-1)
    mean_BT = jnp.sum(weights_XBT * d_weights_XBT, axis=0)
    d_logits_XBT = weights_XBT * (d_weights_XBT - mean_BT)
    # x enters as a value, through its direction in the logit, and through its length there
    scale_XBT = d_logits_XBT * inv_rms_XBT
    # an unused source has logit -inf and weight 0
    finite_XBT = jnp.where(weights_XBT > 0, logits_XBT, 0)
    length_XBT = scale_XBT * inv_rms_XBT * finite_XBT / x_XBTD.shape[-1]
    d_sources_XBTD = (
        weights_XBT[..., None] * d_mix_BTD
        + scale_XBT[..., None] * fused_D
        - length_XBT[..., None] * x_XBTD.astype(acc)
    ).astype(sources_XBTD.dtype)
    d_fused_D = jnp.sum(scale_XBT[..., None] * x_XBTD.astype(acc), axis=(0, 1, 2))
    d_query_D = (d_fused_D * norm_weight_D.astype(acc)).astype(query_D.dtype)
    d_norm_weight_D = (d_fused_D * query_D.astype(acc)).astype(norm_weight_D.dtype)
    return d_query_D, d_norm_weight_D, d_sources_XBTD, None


_mix.defvjp(_mix_fwd, _mix_bwd)


def _used(sources_XBTD, num_sources):
    """Sources with 0 in place of those not used, which may hold anything."""
    if num_sources is None:
        return sources_XBTD
    used_X = jnp.arange(sources_XBTD.shape[0]) < num_sources
    return jnp.where(used_X[:, None, None, None], sources_XBTD, jnp.zeros((), sources_XBTD.dtype))


def scores(query_D, norm_weight_D, x_XBTD, num_sources, eps):
    """1 / rms, logit and softmax weight of every source, [X, B, T] in at least float32."""
    acc = jnp.promote_types(jnp.float32, x_XBTD.dtype)
    fused_D = query_D.astype(acc) * norm_weight_D.astype(acc)
    # sums of products, not einsum: the cast to float32 fuses into them and is never stored
    inv_rms_XBT = jax.lax.rsqrt(jnp.mean(x_XBTD.astype(acc) ** 2, axis=-1) + eps)
    logits_XBT = jnp.sum(x_XBTD.astype(acc) * fused_D, axis=-1) * inv_rms_XBT
    if num_sources is not None:
        used_X = jnp.arange(x_XBTD.shape[0]) < num_sources
        logits_XBT = jnp.where(used_X[:, None, None], logits_XBT, -jnp.inf)
    return inv_rms_XBT, logits_XBT, jax.nn.softmax(logits_XBT, axis=0)


def weighted_sum(weights_XBT, x_XBTD):
    """Sum over the sources, in the weights' dtype."""
    return jnp.sum(weights_XBT[..., None] * x_XBTD.astype(weights_XBT.dtype), axis=0)
