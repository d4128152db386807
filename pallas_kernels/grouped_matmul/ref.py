"""The meaning of grouped_matmul: a loop over groups, differentiated by JAX."""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import gated


def grouped_matmul(rows_RK, weights, group_sizes_E, *, activation, situ_betas, lora_scale):
    """Every group multiplies all rows, the others' set to 0; the products add up.

    Packed weights are unpacked, and adapters multiplied out and added, before.
    """
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)
    weights_EKF = _whole(weights, lora_scale, acc)
    ends_E = jnp.cumsum(group_sizes_E)
    row_R = jnp.arange(rows_RK.shape[0])
    out_RF = jnp.zeros((rows_RK.shape[0], weights_EKF.shape[2]), acc)
    for e in range(weights_EKF.shape[0]):
        mine_R = (row_R >= ends_E[e] - group_sizes_E[e]) & (row_R < ends_E[e])
        own_RK = jnp.where(mine_R[:, None], rows_RK, 0).astype(acc)
        out_RF += jnp.matmul(own_RK, weights_EKF[e], precision="highest")
    if activation is not None:
        out_RF = gated(out_RF, activation, situ_betas)
    return out_RF.astype(rows_RK.dtype)


def _whole(weights, lora_scale, acc):
    """W, or W + scale A B, of every group."""
    base_EKF = weights["base"]
    if "scales" in weights:
        base_EKF = mxfp4.decode(base_EKF, weights["scales"], acc)
    if "a" not in weights:
        return base_EKF.astype(acc)
    a, b_EQF = weights["a"].astype(acc), weights["b"].astype(acc)
    return base_EKF.astype(acc) + lora_scale * jnp.matmul(a, b_EQF, precision="highest")
