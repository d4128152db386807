"""permute and unpermute as gathers in both directions; no scatter-add, no float32 copy of rows."""

import jax
import jax.numpy as jnp

from pallas_kernels.permute.plan import PermutePlan


def permute(x_ML, plan):
    """Gather of tokens into sorted rows."""
    return _permute(x_ML, plan)


def unpermute(rows_RL, weights_MA, plan):
    """Each token gathers its A rows and sums them, weighted, in float32."""
    return _unpermute(rows_RL, weights_MA, plan)


@jax.custom_vjp
def _permute(x_ML, plan):
    num_active = plan.positions.shape[1]
    return _masked_rows(x_ML, plan.order // num_active, plan)


def _permute_fwd(x_ML, plan):
    return _permute(x_ML, plan), plan


def _permute_bwd(plan, d_rows_RL):
    return _sum_of_slots(d_rows_RL, None, plan), None


_permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def _unpermute(rows_RL, weights_MA, plan):
    return _sum_of_slots(rows_RL, weights_MA, plan)


def _unpermute_fwd(rows_RL, weights_MA, plan):
    return _unpermute(rows_RL, weights_MA, plan), (rows_RL, weights_MA, plan)


def _unpermute_bwd(residuals, d_out_ML):
    rows_RL, weights_MA, plan = residuals
    acc = jnp.promote_types(jnp.float32, rows_RL.dtype)
    num_active = plan.positions.shape[1]
    d_out_RL = _masked_rows(d_out_ML, plan.order // num_active, plan).astype(acc)
    weights_R = weights_MA.reshape(-1)[plan.order].astype(acc)
    d_rows_RL = (d_out_RL * weights_R[:, None]).astype(rows_RL.dtype)
    # rows behind the last group may hold anything, NaN included
    real_RL = jnp.where(_is_real(plan)[:, None], rows_RL, 0).astype(acc)
    dots_R = jnp.sum(d_out_RL * real_RL, axis=-1)
    return d_rows_RL, dots_R[plan.positions].astype(weights_MA.dtype), None


_unpermute.defvjp(_unpermute_fwd, _unpermute_bwd)


def _is_real(plan: PermutePlan):
    """[R] True for rows that belong to an expert."""
    return jnp.arange(plan.order.shape[0], dtype=jnp.int32) < jnp.sum(plan.group_sizes)


def _masked_rows(x_ML, token_R, plan):
    """x[token], with 0 behind the last group."""
    rows_RL = jnp.take(x_ML, token_R, axis=0, mode="clip")
    return jnp.where(_is_real(plan)[:, None], rows_RL, jnp.zeros((), x_ML.dtype))


def _sum_of_slots(rows_RL, weights_MA, plan):
    """Per token the (weighted) sum of its A rows; slots without an expert count 0."""
    acc = jnp.promote_types(jnp.float32, rows_RL.dtype)
    num_real = jnp.sum(plan.group_sizes)
    out_ML = jnp.zeros((plan.positions.shape[0], rows_RL.shape[1]), acc)
    # one slot at a time: the sum fuses into the gathers and [M, A, L] never exists
    for slot in range(plan.positions.shape[1]):
        position_M = plan.positions[:, slot]
        part_ML = jnp.take(rows_RL, position_M, axis=0, mode="clip").astype(acc)
        if weights_MA is not None:
            part_ML = part_ML * weights_MA[:, slot, None].astype(acc)
        out_ML += jnp.where((position_M < num_real)[:, None], part_ML, jnp.zeros((), acc))
    return out_ML.astype(rows_RL.dtype)
