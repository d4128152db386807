"""gated_norm in one kernel each way; the backward forms all three gradients from one reading."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _gpu
from pallas_kernels.gated_norm.rows import as_rows, backward, forward
from pallas_kernels.gated_norm.tiles import Tiles, tiles_for

# A row is one program's: 32 values a thread, of five tensors, are what its registers hold.
_MAX_WIDTH = 4096


def gated_norm(x, gate, weight, *, eps):
    """`api.gated_norm`."""
    if x.shape[-1] > _MAX_WIDTH:
        raise NotImplementedError(f"rows of {x.shape[-1]} are wider than {_MAX_WIDTH}")
    return as_rows(functools.partial(_norm, float(eps)), x, gate, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(eps, x_Rh, gate_Rh, weight_h):
    tiles = tiles_for(*x_Rh.shape)
    return _call(
        functools.partial(_forward_body, tiles, x_Rh.shape, eps), "gated_norm",
        pl.cdiv(x_Rh.shape[0], tiles.rows), tiles, (x_Rh, gate_Rh, weight_h),
        jax.ShapeDtypeStruct(x_Rh.shape, x_Rh.dtype),
    )  # fmt: skip


def _norm_fwd(eps, *args):
    return _norm(eps, *args), args


def _norm_bwd(eps, args, dy_Rh):
    x_Rh, gate_Rh, weight_h = args
    tiles = tiles_for(*x_Rh.shape)
    num_programs = pl.cdiv(x_Rh.shape[0], tiles.rows * tiles.blocks)
    dx_Rh, d_gate_Rh, d_weight_Gh = _call(
        functools.partial(_backward_body, tiles, x_Rh.shape, eps), "gated_norm_grad",
        num_programs, tiles, (x_Rh, gate_Rh, weight_h, dy_Rh),
        [
            jax.ShapeDtypeStruct(x_Rh.shape, x_Rh.dtype),
            jax.ShapeDtypeStruct(x_Rh.shape, gate_Rh.dtype),
            jax.ShapeDtypeStruct((num_programs, x_Rh.shape[1]), jnp.float32),
        ],
    )  # fmt: skip
    return dx_Rh, d_gate_Rh, jnp.sum(d_weight_Gh, axis=0)


_norm.defvjp(_norm_fwd, _norm_bwd)


def _call(body, name, num_programs, tiles: Tiles, given, out):
    whole = lambda a: pl.BlockSpec(a.shape, lambda i: (0,) * len(a.shape))  # noqa: E731
    return _gpu.call(
        body, name=name, grid=(num_programs,), in_specs=[whole(a) for a in given],
        out_specs=jax.tree.map(whole, out), out_shape=out, warps=tiles.warps,
    )(*given)  # fmt: skip


def _part(tiles, shape, block):
    """Index of a block of rows, and where there are such rows and columns."""
    num_rows, width = shape
    size = 1 << max(width - 1, 1).bit_length()
    row_r = block * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    column_h = jnp.arange(size, dtype=jnp.int32)
    inside_rh = (row_r < num_rows)[:, None] & (column_h < width)[None, :]
    return (pl.ds(block * tiles.rows, tiles.rows), pl.ds(0, size)), inside_rh


def _weight(ref, size, width):
    inside_h = jnp.arange(size, dtype=jnp.int32) < width
    return _gpu.load(ref.at[pl.ds(0, size)], inside_h)[None, :]


def _forward_body(tiles, shape, eps, x_ref, gate_ref, weight_ref, out_ref):
    at, inside_rh = _part(tiles, shape, pl.program_id(0))
    weight_1h = _weight(weight_ref, inside_rh.shape[1], shape[1])
    x_rh, gate_rh = (_gpu.load(ref.at[at], inside_rh) for ref in (x_ref, gate_ref))
    _gpu.store(out_ref.at[at], forward(x_rh, gate_rh, weight_1h, shape[1], eps), inside_rh)


def _backward_body(
    tiles, shape, eps, x_ref, gate_ref, weight_ref, dy_ref, dx_ref, d_gate_ref, d_weight_ref
):
    program = pl.program_id(0)
    _, like_rh = _part(tiles, shape, 0)
    weight_1h = _weight(weight_ref, like_rh.shape[1], shape[1])

    def one_block(i, d_weight_rh):
        at, inside_rh = _part(tiles, shape, program * tiles.blocks + i)
        x_rh, gate_rh, dy_rh = (_gpu.load(r.at[at], inside_rh) for r in (x_ref, gate_ref, dy_ref))
        dx_rh, d_gate_rh, share_rh = backward(x_rh, gate_rh, weight_1h, dy_rh, shape[1], eps)
        _gpu.store(dx_ref.at[at], dx_rh, inside_rh)
        _gpu.store(d_gate_ref.at[at], d_gate_rh, inside_rh)
        return d_weight_rh + share_rh

    num_blocks = pl.cdiv(shape[0], tiles.rows)
    count = jnp.minimum(tiles.blocks, num_blocks - program * tiles.blocks)
    d_weight_rh = lax.fori_loop(0, count, one_block, jnp.zeros(like_rh.shape, jnp.float32))
    where_1h = (jnp.arange(like_rh.shape[1], dtype=jnp.int32) < shape[1])[None, :]
    at = (pl.ds(program, 1), pl.ds(0, like_rh.shape[1]))
    _gpu.store(d_weight_ref.at[at], jnp.sum(d_weight_rh, axis=0)[None, :], where_1h)
