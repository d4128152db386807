"""The meaning of grouped_matmul: a loop over groups, differentiated by JAX."""

import jax.numpy as jnp

from pallas_kernels.grouped_matmul.activation import gated


def grouped_matmul(rows_RK, weights_EKF, group_sizes_E, *, activation, situ_betas):
    """Every group multiplies all rows, the others' set to 0; the products add up."""
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)
    ends_E = jnp.cumsum(group_sizes_E)
    row_R = jnp.arange(rows_RK.shape[0])
    out_RF = jnp.zeros((rows_RK.shape[0], weights_EKF.shape[2]), acc)
    for e in range(weights_EKF.shape[0]):
        mine_R = (row_R >= ends_E[e] - group_sizes_E[e]) & (row_R < ends_E[e])
        own_RK = jnp.where(mine_R[:, None], rows_RK, 0).astype(acc)
        out_RF += jnp.matmul(own_RK, weights_EKF[e].astype(acc), precision="highest")
    if activation is not None:
        out_RF = gated(out_RF, activation, situ_betas)
    return out_RF.astype(rows_RK.dtype)
