"""The meaning of permute and unpermute: plain indexing, differentiated by JAX."""

import jax.numpy as jnp


def permute(x_ML, plan):
    """Row r is the token of the assignment sorted to place r, or 0 behind the last group."""
    num_real = jnp.sum(plan.group_sizes)
    rows_RL = x_ML[plan.order // plan.positions.shape[1]]
    real_R = jnp.arange(rows_RL.shape[0]) < num_real
    return jnp.where(real_R[:, None], rows_RL, 0)


def unpermute(rows_RL, weights_MA, plan):
    """Scatter-adds each weighted row to its token."""
    acc = jnp.promote_types(jnp.float32, rows_RL.dtype)
    num_tokens, num_active = plan.positions.shape
    real_R = jnp.arange(rows_RL.shape[0]) < jnp.sum(plan.group_sizes)
    weights_R = weights_MA.reshape(-1)[plan.order].astype(acc)
    # Before the product: its gradient would read what lies behind the last group.
    rows_or_0_RL = jnp.where(real_R[:, None], rows_RL.astype(acc), 0)
    weighted_RL = rows_or_0_RL * weights_R[:, None]
    out_ML = jnp.zeros((num_tokens, rows_RL.shape[1]), acc)
    return out_ML.at[plan.order // num_active].add(weighted_RL).astype(rows_RL.dtype)
