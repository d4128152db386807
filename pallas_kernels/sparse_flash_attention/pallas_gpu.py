"""sparse_flash_attention for NVIDIA GPUs: one kernel forward, two back. README.md has the maths.

A program has some heads of one query and goes through its slots, a tile at a time: it reads the
indices, fetches the rows they name, and uses them both as keys and as values.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.blocks import NO_KEY_LSE
from pallas_kernels.choose import target_chip
from pallas_kernels.saved import ATTENDED, saved
from pallas_kernels.sparse_flash_attention import chunked
from pallas_kernels.sparse_flash_attention.pallas_gpu_grads import gradients
from pallas_kernels.sparse_flash_attention.pallas_gpu_tile import (
    LOG2_E,
    Heads,
    Sizes,
    Slots,
    dots,
    head_tile,
    num_tiles,
    of_query,
    of_row,
    used_slots,
)
from pallas_kernels.sparse_flash_attention.tiles import tiles_for

_LOWEST = -1e30
_MAX_HEADS = 128


def sparse_flash_attention(q_latent, q_rope, latent, k_rope, indices, *, scale, deterministic):
    """See api.py; differentiable once, through the output and the lse."""
    _refuse(q_latent, q_rope, latent, indices, scale)
    B, _, N, C = q_latent.shape
    S, R, J = latent.shape[1], q_rope.shape[-1], indices.shape[2]
    sizes = Sizes(B, S, N, C, R, J, float(scale))
    queries, rows = (q_latent, q_rope)[: 1 + (R > 0)], (latent, k_rope)[: 1 + (R > 0)]
    return _attend(sizes, deterministic, queries, rows, indices.astype(jnp.int32))


def _refuse(q_latent, q_rope, latent, indices, scale):
    if q_latent.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"{q_latent.dtype} has no kernel")
    if 0 in (*q_latent.shape, *latent.shape, *indices.shape):
        raise NotImplementedError("an empty array needs no kernel")
    for name, width in (("latent", q_latent.shape[-1]), ("rotated", q_rope.shape[-1])):
        if width and (width & (width - 1) or not 16 <= width <= 512):
            raise NotImplementedError(f"{name} width {width} is no power of two from 16 to 512")
    if q_latent.shape[2] > _MAX_HEADS:
        raise NotImplementedError(f"{q_latent.shape[2]} heads are more than {_MAX_HEADS}")
    if not scale > 0:
        raise NotImplementedError(f"scale={scale} is not positive")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(sizes: Sizes, deterministic, queries, rows, indices):
    tile = tiles_for(sizes.C, queries[0].dtype.itemsize, target_chip()).forward
    heads = head_tile(sizes.N, tile.heads)
    B, T, _ = indices.shape
    used = used_slots(indices)
    out = [
        jax.ShapeDtypeStruct((B, T, sizes.N, sizes.C), jnp.float32),
        jax.ShapeDtypeStruct((B, T, sizes.N), jnp.float32),
    ]
    return tuple(
        _gpu.call(
            functools.partial(_body, sizes, heads, tile.keys), name="sparse_flash_attention",
            grid=(pl.cdiv(sizes.N, heads), T, B),
            in_specs=[of_row(used), of_query(indices), *map(of_query, queries), *map(of_row, rows)],
            out_specs=[*map(of_query, out)], out_shape=out, warps=tile.warps, stages=tile.stages,
        )(used, indices, *queries, *rows)
    )  # fmt: skip


def _attend_fwd(sizes, deterministic, queries, rows, indices):
    out, lse = saved(_attend(sizes, deterministic, queries, rows, indices), ATTENDED)
    return (out, lse), (queries, rows, indices, out, lse)


def _attend_bwd(sizes, deterministic, residuals, cotangents):
    queries, rows, indices, out, lse = residuals
    dout, dlse = cotangents
    shift_BTN = dlse - jnp.sum(dout * out, axis=-1)
    dout = dout.astype(queries[0].dtype)
    if not deterministic:
        return *gradients(sizes, queries, rows, indices, lse, dout, shift_BTN), None
    q_BTNK, rows_BSK = (jnp.concatenate(x, -1) for x in (queries, rows))
    dq, drows = chunked.backward_dense(
        q_BTNK, rows_BSK, indices, lse, dout, shift_BTN, sizes.C, sizes.scale
    )
    cut = [sizes.C][: len(rows) - 1]
    drows = drows.astype(rows_BSK.dtype)
    return tuple(jnp.split(dq, cut, -1)), tuple(jnp.split(drows, cut, -1)), None


_attend.defvjp(_attend_fwd, _attend_bwd)


def _body(sizes: Sizes, num_heads, num_keys, used_ref, indices_ref, *refs):
    q_refs, rows_refs = refs[: len(refs) // 2 - 1], refs[len(refs) // 2 - 1 : -2]
    out_ref, lse_ref = refs[-2:]
    heads = Heads(pl.program_id(0) * num_heads, num_heads, sizes.N)
    factor = sizes.scale * LOG2_E
    q_n = [heads.read(ref) for ref in q_refs]

    def step(number, carry):
        top_n, total_n, out_nC = carry
        slots = Slots.of(indices_ref, number, num_keys)
        rows_j = slots.read(rows_refs)
        s_nj = jnp.where(slots.chosen_j[None, :], dots(q_n, rows_j) * factor, -jnp.inf)
        new_top_n = jnp.maximum(top_n, jnp.max(s_nj, axis=1))
        p_nj = jnp.exp2(s_nj - new_top_n[:, None])
        fade_n = jnp.exp2(top_n - new_top_n)
        total_n = fade_n * total_n + jnp.sum(p_nj, axis=1)
        out_nC = fade_n[:, None] * out_nC + _gpu.dot(p_nj.astype(rows_j[0].dtype), rows_j[0])
        return new_top_n, total_n, out_nC

    zeros_n = jnp.zeros((num_heads,), jnp.float32)
    carry = (zeros_n + _LOWEST, zeros_n, jnp.zeros((num_heads, sizes.C), jnp.float32))
    tiles = num_tiles(used_ref, pl.program_id(1), num_keys)
    top_n, total_n, out_nC = lax.fori_loop(0, tiles, step, carry)
    safe_n = jnp.where(total_n > 0, total_n, 1)
    heads.write(out_ref, out_nC / safe_n[:, None])
    lse_n = jnp.where(total_n > 0, (top_n + jnp.log2(safe_n)) / LOG2_E, NO_KEY_LSE)
    heads.write_thin(lse_ref, lse_n)
