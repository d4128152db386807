"""Kimi Delta Attention in chunks: linear memory, matrix products, any gate; plain jnp.

Groups of chunks run one after another; inside a group, all that does not need the state is computed
for its chunks at once, and a short loop carries the state through them. The gradient saves the
inputs and, of each chunk, the entry state and two c x c triangles, computes the rest again, and
runs backwards. README.md has the maths.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.kda import triangle
from pallas_kernels.kda.triangle import matmul, transposed, turned

# Multiply-adds that make a group: below it the fixed cost of an operation shows, above it nothing
# is gained and memory grows.
_WORK = 1 << 22


def kda(q, k, v, log_decay, beta, *, segment_ids, initial_state, scale, chunk):
    """`api.kda` with every default filled in."""
    B, T, Nv, h = v.shape
    H = q.shape[-1]
    dtype = sum_dtype(q, k, v, log_decay, beta)
    if initial_state is None:
        initial_state = jnp.zeros((B, Nv, H, h), dtype)
    chunk = min(chunk, 1 << (T - 1).bit_length())  # a short row needs no long chunk
    chunks = -(-T // chunk)
    groups = _groups(chunks, B * Nv * chunk * H * (H + h + chunk))
    padding = groups * -(-chunks // groups) * chunk - T
    inputs = [_pad(x, padding) for x in (q, k, v, log_decay, beta)]
    if segment_ids is not None:
        # the last document goes on, so that the state at the end is that of position T
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), mode="edge")
    out, final_state = _kda(scale, chunk, groups, *inputs, segment_ids, initial_state.astype(dtype))
    return out[:, :T], final_state


def _groups(chunks, work):
    """Number of groups that `chunks`, of so many multiply-adds in a product, are split into."""
    largest = max(1, min(chunks, _WORK // work))
    return -(-chunks // largest)


def _pad(x, padding):
    return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x


class _Group(NamedTuple):
    """K chunks, then heads before positions, in the dtype of the sums; q is scaled."""

    q_KBNcH: jax.Array
    k_KBNcH: jax.Array
    v_KBNch: jax.Array
    g_KBNcH: jax.Array
    beta_KBNc1: jax.Array
    ids_KB1c1: jax.Array | None
    entry_KB111: jax.Array | None  # segment that the entry state of a chunk belongs to


def _chunks_first(x_BTNW, i, K, chunk, dtype):
    """Group `i` of K chunks: [B, T, N, W] -> [K, B, N, c, W]."""
    x = jax.lax.dynamic_slice_in_dim(x_BTNW, i * K * chunk, K * chunk, axis=1).astype(dtype)
    x = x.reshape(x.shape[0], K, chunk, *x.shape[2:])
    return jnp.transpose(x, (1, 0, 3, 2, 4))


def _positions_first(x_KBNcW):
    """[K, B, N, c, W] -> [B, K c, N, W]."""
    x = jnp.transpose(x_KBNcW, (1, 0, 3, 2, 4))
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _load(i, K, chunk, scale, dtype, q, k, v, log_decay, beta, segment_ids) -> _Group:
    """Group `i` of the whole arrays, 0 in padding; q and k repeated for grouped values."""
    group = v.shape[2] // q.shape[2]
    ids = entry = None

    def load(x, group=1):
        x = _real(_chunks_first(x, i, K, chunk, dtype), ids)
        return jnp.repeat(x, group, axis=2) if group > 1 else x

    if segment_ids is not None:
        whole = segment_ids[:, :, None, None]
        ids = _chunks_first(whole, i, K, chunk, segment_ids.dtype)
        before = jnp.maximum((i * K + jnp.arange(K)) * chunk - 1, 0)
        entry = jnp.take(segment_ids, before, axis=1).T[:, :, None, None, None]
    # the barrier: or every operation that reads them cuts and transposes them once more
    return jax.lax.optimization_barrier(
        _Group(
            load(q, group) * scale, load(k, group), load(v), load(log_decay), load(beta[..., None]),
            ids, entry,
        )
    )  # fmt: skip


def _real(x_KBNcW, ids_KB1c1):
    """0 in padding. Here, where a group is loaded, no copy of a whole array is made for it."""
    return x_KBNcW if ids_KB1c1 is None else jnp.where(ids_KB1c1 != 0, x_KBNcW, 0)


class _Inside(NamedTuple):
    """What chunks need besides their entry states; factors include the documents' borders."""

    factors: triangle.Decays
    k_in_KBNcH: jax.Array  # keys and queries as they meet the entry state, 0 in later documents
    q_in_KBNcH: jax.Array
    from_start_KBNcH: jax.Array
    k_out_KBNcH: jax.Array  # keys as they reach the exit state, 0 in earlier documents
    to_end_KBNcH: jax.Array
    carry_KBNH1: jax.Array  # decay from the entry state to the exit state
    scores_KBNcc: jax.Array
    inverse_KBNcc: jax.Array
    erase_in_KBNcH: jax.Array  # what the entry state is written over with: minus this times it


def _inside(x: _Group, saved=None) -> _Inside:
    """`saved`: scores and inverse, where a forward pass has kept them."""
    factors = triangle.decays(x.g_KBNcH)
    from_start, to_end = factors.from_start, factors.to_end
    carry = from_start[..., -1, :, None]
    if x.ids_KB1c1 is not None and x.entry_KB111 is not None:
        last = x.ids_KB1c1[..., -1:, :]
        from_start = jnp.where(x.ids_KB1c1 == x.entry_KB111, from_start, 0)
        to_end = jnp.where(x.ids_KB1c1 == last, to_end, 0)
        carry = jnp.where(x.entry_KB111 == last, carry, 0)
    scores, inverse = saved or triangle.products_and_inverse(
        x.q_KBNcH, x.k_KBNcH, x.beta_KBNc1 * x.k_KBNcH, factors, x.ids_KB1c1
    )
    k_in = x.k_KBNcH * from_start
    return _Inside(
        factors, k_in, x.q_KBNcH * from_start, from_start, x.k_KBNcH * to_end, to_end, carry,
        scores, inverse, matmul(inverse, x.beta_KBNc1 * k_in),
    )  # fmt: skip


def _scan(step, carry, xs, *, reverse=False):
    """`lax.scan`, without a loop around a single step."""
    alone = jax.tree.leaves(xs)[0].shape[0] == 1
    return jax.lax.scan(step, carry, xs, reverse=reverse, unroll=alone)


def _forward(scale, chunk, groups, keep, *args):
    *inputs, initial_state = args
    dtype, v = initial_state.dtype, inputs[2]
    K = v.shape[1] // chunk // groups

    def step(state, i):
        x = _load(i, K, chunk, scale, dtype, *inputs)
        inside = _inside(x)
        fresh = matmul(inside.inverse_KBNcc, x.beta_KBNc1 * x.v_KBNch)

        def pass_on(state, chunk_of):
            fresh, erase_in, k_out_Hc, carry = chunk_of
            written = fresh - matmul(erase_in, state)
            return carry * state + matmul(k_out_Hc, written), (state, written)

        k_out_Hc = turned(inside.k_out_KBNcH)
        chunks = (fresh, inside.erase_in_KBNcH, k_out_Hc, inside.carry_KBNH1)
        state, (entries, written) = _scan(pass_on, state, chunks)
        out = matmul(inside.q_in_KBNcH, entries) + matmul(inside.scores_KBNcc, written)
        kept = (entries, (inside.scores_KBNcc, inside.inverse_KBNcc)) if keep else None
        return state, (_positions_first(out).astype(v.dtype), kept)

    final_state, (out, kept) = _scan(step, initial_state, jnp.arange(groups))
    return _whole(out), final_state, kept


def _whole(groups):
    """[G, B, K c, ...] -> [B, G K c, ...]."""
    x = jnp.moveaxis(groups, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _kda(scale, chunk, groups, *args):
    out, final_state, _ = _forward(scale, chunk, groups, False, *args)
    return out, final_state


def _kda_fwd(scale, chunk, groups, *args):
    out, final_state, kept = _forward(scale, chunk, groups, True, *args)
    return (out, final_state), (args[:-1], kept)


def _kda_bwd(scale, chunk, groups, residuals, cotangents):
    inputs, kept = residuals
    d_out, d_final = cotangents
    K, dtype = kept[0].shape[1], kept[0].dtype
    group = inputs[2].shape[2] // inputs[0].shape[2]

    def step(d_exit, i_and_kept):
        i, (entries, triangles) = i_and_kept
        x = _load(i, K, chunk, scale, dtype, *inputs)
        d_out_K = _real(_chunks_first(d_out, i, K, chunk, dtype), x.ids_KB1c1)
        dq, dk, dv, dg, d_beta, d_entry = _group_vjp(x, entries, triangles, d_out_K, d_exit)
        grads = (_group_sum(scale * dq, group), _group_sum(dk, group), dv, dg, d_beta)
        pairs = zip(grads, inputs, strict=False)  # segment ids, last of the inputs, have none
        return d_entry, [_positions_first(d).astype(a.dtype) for d, a in pairs]

    d_initial, grads = _scan(step, d_final.astype(dtype), (jnp.arange(groups), kept), reverse=True)
    *grads, d_beta = map(_whole, grads)
    return (*grads, d_beta[..., 0], None, d_initial)


_kda.defvjp(_kda_fwd, _kda_bwd)


def _group_sum(x_KBNcH, group):
    """Sum over the value heads that share a key head."""
    K, B, N, c, H = x_KBNcH.shape
    return x_KBNcH.reshape(K, B, N // group, group, c, H).sum(3) if group > 1 else x_KBNcH


def _group_vjp(x: _Group, entries, triangles, d_out, d_exit):
    """Gradients of a group's inputs and entry state, from those of its output and exit state."""
    inside = _inside(x, triangles)
    k_in, q_in, k_out = inside.k_in_KBNcH, inside.q_in_KBNcH, inside.k_out_KBNcH
    error = x.v_KBNch - matmul(k_in, entries)
    written = matmul(inside.inverse_KBNcc, x.beta_KBNc1 * error)

    d_read = matmul(turned(inside.scores_KBNcc), d_out)
    d_entry_read = matmul(turned(q_in), d_out)

    def pass_back(d_exit, chunk_of):
        d_entry_read, d_read, erase_in_Hc, k_out, carry = chunk_of
        d_written = d_read + matmul(k_out, d_exit)
        d_entry = carry * d_exit + d_entry_read - matmul(erase_in_Hc, d_written)
        return d_entry, (d_exit, d_written)

    erase_in_Hc = turned(inside.erase_in_KBNcH)
    chunks = (d_entry_read, d_read, erase_in_Hc, k_out, inside.carry_KBNH1)
    d_entry, (d_exits, d_written) = _scan(pass_back, d_exit, chunks, reverse=True)

    d_solved = matmul(turned(inside.inverse_KBNcc), d_written)
    dv = x.beta_KBNc1 * d_solved
    d_k_in = -matmul(dv, transposed(entries))
    d_q_in = matmul(d_out, transposed(entries))
    d_k_out = matmul(written, transposed(d_exits))

    dq, d_erase, dk, (d_near, d_far) = triangle.products_vjp(
        x.q_KBNcH, x.k_KBNcH, x.beta_KBNc1 * x.k_KBNcH, inside.factors, x.ids_KB1c1,
        matmul(d_out, transposed(written)), -matmul(d_solved, transposed(written)),
    )  # fmt: skip
    d_beta = jnp.sum(d_solved * error, -1, keepdims=True)
    d_beta += jnp.sum(d_erase * x.k_KBNcH, -1, keepdims=True)
    dq += inside.from_start_KBNcH * d_q_in
    dk += x.beta_KBNc1 * d_erase + inside.from_start_KBNcH * d_k_in + inside.to_end_KBNcH * d_k_out
    # a decay multiplies a row y, so the sum in its exponent receives y * dy
    d_from_start = k_in * d_k_in + q_in * d_q_in
    d_carry = jnp.sum(inside.carry_KBNH1 * entries * d_exits, axis=-1)
    d_from_start = d_from_start.at[..., -1, :].add(d_carry)
    d_sums = triangle.Decays(d_near, d_far, d_from_start, k_out * d_k_out)
    return dq, dk, dv, triangle.sums_vjp(d_sums), d_beta, d_entry
