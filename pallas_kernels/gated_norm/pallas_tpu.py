"""gated_norm on TPUs: blocks of rows, one after the other; the weight's gradient grows in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import _tpu
from pallas_kernels.gated_norm.rows import as_rows, backward, forward
from pallas_kernels.gated_norm.tiles import tiles_for

_MAX_WIDTH = 8192


def gated_norm(x, gate, weight, *, eps):
    """`api.gated_norm`."""
    if x.shape[-1] > _MAX_WIDTH:
        raise NotImplementedError(f"rows of {x.shape[-1]} are wider than {_MAX_WIDTH}")
    return as_rows(functools.partial(_norm, float(eps)), x, gate, weight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(eps, x_Rh, gate_Rh, weight_h):
    block, line, grid = _blocks(x_Rh)
    return _tpu.call(
        functools.partial(_forward_body, eps), name="gated_norm", grid=grid, parallel=1,
        in_specs=(block, block, line), out_specs=block,
        out_shape=jax.ShapeDtypeStruct(x_Rh.shape, x_Rh.dtype),
    )(x_Rh, gate_Rh, weight_h[None])  # fmt: skip


def _norm_fwd(eps, *args):
    return _norm(eps, *args), args


def _norm_bwd(eps, args, dy_Rh):
    x_Rh, gate_Rh, weight_h = args
    block, line, grid = _blocks(x_Rh)
    shapes = (x_Rh, gate_Rh, jax.ShapeDtypeStruct((1, x_Rh.shape[1]), jnp.float32))
    dx_Rh, d_gate_Rh, d_weight_1h = _tpu.call(
        functools.partial(_backward_body, eps, x_Rh.shape[0]), name="gated_norm_grad", grid=grid,
        in_specs=(block, block, line, block), out_specs=(block, block, line),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes],
    )(x_Rh, gate_Rh, weight_h[None], dy_Rh)  # fmt: skip
    return dx_Rh, d_gate_Rh, d_weight_1h[0]


_norm.defvjp(_norm_fwd, _norm_bwd)


def _blocks(x_Rh):
    """What a step has of an array like x and of the weight, and the steps."""
    num_rows, width = x_Rh.shape
    rows = tiles_for(num_rows, width, "v5p").rows
    block = pl.BlockSpec((rows, width), lambda i: (i, 0))
    return block, pl.BlockSpec((1, width), lambda i: (0, 0)), (pl.cdiv(num_rows, rows),)


def _forward_body(eps, x_ref, gate_ref, weight_ref, out_ref):
    y_rh = forward(x_ref[...], gate_ref[...], weight_ref[...], x_ref.shape[1], eps)
    out_ref[...] = y_rh.astype(out_ref.dtype)


def _backward_body(
    eps, num_rows, x_ref, gate_ref, weight_ref, dy_ref, dx_ref, d_gate_ref, d_weight_ref
):
    @pl.when(pl.program_id(0) == 0)
    def _():
        d_weight_ref[...] = jnp.zeros_like(d_weight_ref)

    dx_rh, d_gate_rh, share_rh = backward(
        x_ref[...], gate_ref[...], weight_ref[...], dy_ref[...], x_ref.shape[1], eps
    )
    dx_ref[...] = dx_rh.astype(dx_ref.dtype)
    d_gate_ref[...] = d_gate_rh.astype(d_gate_ref.dtype)
    # the last block may reach past the last row, where memory holds anything
    row_r1 = pl.program_id(0) * x_ref.shape[0] + lax.broadcasted_iota(
        jnp.int32, (x_ref.shape[0], 1), 0
    )
    share_rh = jnp.where(row_r1 < num_rows, share_rh, 0)
    d_weight_ref[...] += jnp.sum(share_rh, axis=0, keepdims=True)
