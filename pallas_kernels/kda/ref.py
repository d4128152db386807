"""Kimi Delta Attention position by position: the meaning of the operator, never optimised."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.padding import without_padding


def kda(q, k, v, log_decay, beta, *, segment_ids, initial_state, scale, chunk):
    """The recurrence of README.md, one `lax.scan` step a position; shapes as in `api.kda`."""
    del chunk  # the recurrence has none
    dtype = sum_dtype(q, k, v, log_decay, beta)
    B, T, Nv, h = v.shape
    H, group = q.shape[-1], Nv // q.shape[2]
    q, k, v = without_padding(segment_ids, q, k, v)
    q, k = (jnp.repeat(x.astype(dtype), group, axis=2) for x in (q, k))
    if initial_state is None:
        initial_state = jnp.zeros((B, Nv, H, h), dtype)
    ids = jnp.ones((B, T), jnp.int32) if segment_ids is None else segment_ids
    starts = ids != jnp.concatenate([ids[:, :1], ids[:, :-1]], axis=1)

    def step(state_BNHh, inputs):
        q_BNH, k_BNH, v_BNh, g_BNH, beta_BN, starts_B = inputs
        state_BNHh = jnp.where(starts_B[:, None, None, None], 0, state_BNHh)
        state_BNHh = jnp.exp(g_BNH)[..., None] * state_BNHh
        error_BNh = v_BNh - _read(state_BNHh, k_BNH)
        write_BNHh = k_BNH[..., None] * error_BNh[:, :, None, :]
        state_BNHh = state_BNHh + beta_BN[..., None, None] * write_BNHh
        return state_BNHh, scale * _read(state_BNHh, q_BNH)

    floats = tuple(x.astype(dtype) for x in (q, k, v, log_decay, beta))
    xs = tuple(jnp.moveaxis(x, 1, 0) for x in (*floats, starts))
    state, out = jax.lax.scan(step, initial_state.astype(dtype), xs)
    (out,) = without_padding(segment_ids, jnp.moveaxis(out, 0, 1))
    return out.astype(v.dtype), state


def _read(state_BNHh, key_BNH):
    return jnp.einsum("bnij,bni->bnj", state_BNHh, key_BNH, precision="highest")
