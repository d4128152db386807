"""Kimi Delta Attention in chunks: linear memory, matrix products, any gate; plain jnp.

One scan over the chunks carries the state. The gradient saves the inputs and, of each chunk, the
entry state and two c x c triangles, computes the rest again, and scans the chunks backwards.
README.md has the maths.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.kda import triangle
from pallas_kernels.kda.triangle import matmul, transposed


def kda(q, k, v, log_decay, beta, *, segment_ids, initial_state, scale, chunk):
    """`api.kda` with every default filled in."""
    B, T, Nv, h = v.shape
    H = q.shape[-1]
    dtype = sum_dtype(q, k, v, log_decay, beta)
    if initial_state is None:
        initial_state = jnp.zeros((B, Nv, H, h), dtype)
    chunk = min(chunk, 1 << (T - 1).bit_length())  # a short row needs no long chunk
    padding = -T % chunk
    inputs = [_pad(x, padding) for x in (q, k, v, log_decay, beta)]
    if segment_ids is not None:
        # the last document goes on, so that the state at the end is that of position T
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), mode="edge")
    out, final_state = _kda(scale, chunk, *inputs, segment_ids, initial_state.astype(dtype))
    return out[:, :T], final_state


def _pad(x, padding):
    return jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) if padding else x


class _Chunk(NamedTuple):
    """One chunk, heads before positions, in the dtype of the sums; q is scaled."""

    q_BNcH: jax.Array
    k_BNcH: jax.Array
    v_BNch: jax.Array
    g_BNcH: jax.Array
    beta_BNc1: jax.Array
    segments_Bc: jax.Array | None
    entry_B: jax.Array | None  # segment that the entry state belongs to


def _load(i, chunk, scale, dtype, q, k, v, log_decay, beta, segment_ids):
    """Chunk `i` of the whole arrays; q and k repeated for grouped values."""

    def heads_first(x, group=1):
        x = jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk, axis=1).astype(dtype)
        x = jnp.swapaxes(x, 1, 2)
        return jnp.repeat(x, group, axis=1) if group > 1 else x

    group = v.shape[2] // q.shape[2]
    segments = entry = None
    if segment_ids is not None:
        segments = jax.lax.dynamic_slice_in_dim(segment_ids, i * chunk, chunk, axis=1)
        before = jnp.maximum(i * chunk - 1, 0)
        entry = jax.lax.dynamic_index_in_dim(segment_ids, before, axis=1, keepdims=False)
    beta = heads_first(beta[..., None])
    q, k = heads_first(q, group), heads_first(k, group)
    return _Chunk(q * scale, k, heads_first(v), heads_first(log_decay), beta, segments, entry)


class _Inside(NamedTuple):
    """What a chunk needs besides its entry state; factors include the documents' borders."""

    factors: triangle.Decays
    from_start_BNcH: jax.Array  # decay from the entry state to each row, 0 in later documents
    to_end_BNcH: jax.Array  # decay from each row to the exit state, 0 in earlier documents
    carry_BNH1: jax.Array  # decay from the entry state to the exit state
    scores_BNcc: jax.Array
    inverse_BNcc: jax.Array


def _inside(x: _Chunk, saved=None) -> _Inside:
    """`saved`: scores and inverse, where a forward pass has kept them."""
    factors = triangle.decays(x.g_BNcH)
    from_start, to_end = factors.from_start, factors.to_end
    carry = from_start[..., -1, :, None]
    if x.segments_Bc is not None and x.entry_B is not None:
        last = x.segments_Bc[:, -1]
        from_entry = (x.segments_Bc == x.entry_B[:, None])[:, None, :, None]
        into_exit = (x.segments_Bc == last[:, None])[:, None, :, None]
        from_start = jnp.where(from_entry, from_start, 0)
        to_end = jnp.where(into_exit, to_end, 0)
        carry = jnp.where((x.entry_B == last)[:, None, None, None], carry, 0)
    scores, inverse = saved or triangle.products_and_inverse(
        x.q_BNcH, x.k_BNcH, x.beta_BNc1 * x.k_BNcH, factors, x.segments_Bc
    )
    return _Inside(factors, from_start, to_end, carry, scores, inverse)


def _read(x: _Chunk, inside: _Inside, state_BNHh):
    """Answers of the entry state to the queries, its error at the keys, and the values written."""
    chunk = x.k_BNcH.shape[-2]
    rows = jnp.concatenate(
        [x.k_BNcH * inside.from_start_BNcH, x.q_BNcH * inside.from_start_BNcH], 2
    )
    answers = matmul(rows, state_BNHh)
    error = x.v_BNch - answers[..., :chunk, :]
    written = matmul(inside.inverse_BNcc, x.beta_BNc1 * error)
    return rows, answers[..., chunk:, :], error, written


def _forward(scale, chunk, keep, *args):
    *inputs, initial_state = args
    dtype, v = initial_state.dtype, inputs[2]

    def step(state, i):
        x = _load(i, chunk, scale, dtype, *inputs)
        inside = _inside(x)
        _, answers, _, written = _read(x, inside, state)
        out = answers + matmul(inside.scores_BNcc, written)
        exit_state = inside.carry_BNH1 * state + matmul(
            transposed(x.k_BNcH * inside.to_end_BNcH), written
        )
        out = jnp.swapaxes(out, 1, 2).astype(v.dtype)
        kept = (state, (inside.scores_BNcc, inside.inverse_BNcc)) if keep else None
        return exit_state, (out, kept)

    final_state, (out, kept) = jax.lax.scan(step, initial_state, jnp.arange(v.shape[1] // chunk))
    return _whole(out), final_state, kept


def _whole(chunks):
    """[G, B, c, ...] -> [B, G c, ...]."""
    x = jnp.moveaxis(chunks, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _kda(scale, chunk, *args):
    out, final_state, _ = _forward(scale, chunk, False, *args)
    return out, final_state


def _kda_fwd(scale, chunk, *args):
    out, final_state, kept = _forward(scale, chunk, True, *args)
    return (out, final_state), (args[:-1], kept)


def _kda_bwd(scale, chunk, residuals, cotangents):
    inputs, kept = residuals
    d_out, d_final = cotangents
    entries = kept[0]
    dtype = entries.dtype
    group = inputs[2].shape[2] // inputs[0].shape[2]

    def step(d_exit, i_and_kept):
        i, (state, triangles) = i_and_kept
        x = _load(i, chunk, scale, dtype, *inputs)
        d_out_c = jax.lax.dynamic_slice_in_dim(d_out, i * chunk, chunk, axis=1)
        d_out_c = jnp.swapaxes(d_out_c.astype(dtype), 1, 2)
        dq, dk, dv, dg, d_beta, d_entry = _chunk_vjp(x, state, triangles, d_out_c, d_exit)
        grads = (_group_sum(scale * dq, group), _group_sum(dk, group), dv, dg, d_beta)
        pairs = zip(grads, inputs, strict=False)  # segment ids, last of the inputs, have none
        return d_entry, [jnp.swapaxes(d, 1, 2).astype(a.dtype) for d, a in pairs]

    indices = jnp.arange(entries.shape[0])
    d_initial, grads = jax.lax.scan(step, d_final.astype(dtype), (indices, kept), reverse=True)
    return (*map(_whole, grads), None, d_initial)


_kda.defvjp(_kda_fwd, _kda_bwd)


def _group_sum(x_BNcH, group):
    """Sum over the value heads that share a key head."""
    B, N, c, H = x_BNcH.shape
    return x_BNcH.reshape(B, N // group, group, c, H).sum(2) if group > 1 else x_BNcH


def _chunk_vjp(x: _Chunk, state, triangles, d_out, d_exit):
    """Gradients of one chunk's inputs and entry state, from those of its output and exit state."""
    inside = _inside(x, triangles)
    rows, _, error, written = _read(x, inside, state)
    k_out = x.k_BNcH * inside.to_end_BNcH
    chunk = k_out.shape[-2]

    d_written = matmul(transposed(inside.scores_BNcc), d_out) + matmul(k_out, d_exit)
    d_solved = matmul(transposed(inside.inverse_BNcc), d_written)
    dv = x.beta_BNc1 * d_solved
    # rows of [k; q] that read the entry state receive -dv and d_out from what they read
    d_answers = jnp.concatenate([-dv, d_out], axis=2)
    d_rows = matmul(d_answers, transposed(state))
    d_entry = inside.carry_BNH1 * d_exit + matmul(transposed(rows), d_answers)

    erase = x.beta_BNc1 * x.k_BNcH
    dq, d_erase, dk_inside, (d_pairs, d_levels) = triangle.products_vjp(
        x.q_BNcH, x.k_BNcH, erase, inside.factors, x.segments_Bc,
        matmul(d_out, transposed(written)), -matmul(d_solved, transposed(written)),
    )  # fmt: skip
    d_beta = jnp.sum(d_solved * error, -1) + jnp.sum(d_erase * x.k_BNcH, -1)

    dq += inside.from_start_BNcH * d_rows[..., chunk:, :]
    dk = dk_inside + x.beta_BNc1 * d_erase + inside.from_start_BNcH * d_rows[..., :chunk, :]
    d_k_out = matmul(written, transposed(d_exit))
    dk += inside.to_end_BNcH * d_k_out
    # a decay multiplies a row y, so the sum in its exponent receives y * dy
    d_from_start = rows * d_rows
    d_from_start = d_from_start[..., :chunk, :] + d_from_start[..., chunk:, :]
    d_carry = jnp.sum(inside.carry_BNH1 * state * d_exit, axis=-1)
    d_from_start = d_from_start.at[..., -1, :].add(d_carry)
    d_sums = triangle.Decays(d_pairs, d_levels, d_from_start, k_out * d_k_out)
    return dq, dk, dv, triangle.sums_vjp(d_sums), d_beta, d_entry
