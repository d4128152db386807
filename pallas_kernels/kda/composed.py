"""`kda_fused` put together from small functions and an implementation of `kda`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_kernels.kda import gates
from pallas_kernels.padding import without_padding


def fused(recurrence: Callable[..., Any]) -> Callable[..., Any]:
    """`api.kda_fused`, every default filled in, over an implementation of `api.kda`."""

    def kda_fused(
        q, k, v, gate, beta_logits, a_log, dt_bias, *, lower_bound, segment_ids, initial_state,
        scale, chunk, return_transition,
    ):  # fmt: skip
        # before the nonlinear parts, whose derivatives at NaN times 0 are NaN
        q, k, gate, beta_logits = without_padding(segment_ids, q, k, gate, beta_logits)
        q, k = gates.unit_length(q), gates.unit_length(k)
        log_decay = gates.log_decay(gate, a_log, dt_bias, lower_bound)
        beta = gates.write_strength(beta_logits)
        # and after them: nothing decays, nothing is written
        log_decay, beta = without_padding(segment_ids, log_decay, beta)
        options = {"segment_ids": segment_ids, "scale": scale, "chunk": chunk}

        def run(values, entry):
            return recurrence(q, k, values, log_decay, beta, initial_state=entry, **options)

        if not return_transition:
            return run(v, initial_state)
        # float32 values, so that the part that meets the entry state is not rounded before it does
        return with_transition(run, v.astype(log_decay.dtype), q.shape[-1], v.dtype, initial_state)

    return kda_fused


def with_transition(run, v, H, dtype, initial_state):
    """One run of h + H columns: v from a zero state, and zero values from the unit matrix.

    Args:
      run: (values [B, T, Nv, h + H], entry state) -> output and final state, neither rounded.
      dtype: of the output that is returned.
    """
    B, _, Nv, h = v.shape
    values = jnp.concatenate([v, jnp.zeros((*v.shape[:3], H), v.dtype)], axis=-1)
    state_dtype = jnp.promote_types(v.dtype, jnp.float32)
    unit = jnp.concatenate([jnp.zeros((H, h)), jnp.eye(H)], axis=-1).astype(state_dtype)
    both, final = run(values, jnp.broadcast_to(unit, (B, Nv, H, h + H)))
    out, exit_state, transition = both[..., :h], final[..., :h], final[..., h:]
    final_state = exit_state
    if initial_state is not None:
        entry = initial_state.astype(final.dtype)
        out += jnp.einsum("btni,bnij->btnj", both[..., h:], entry, precision="highest")
        final_state += jnp.matmul(transition, entry, precision="highest")
    return out.astype(dtype), final_state, transition, exit_state
