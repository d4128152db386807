"""Grouped matmul over tiles of rows: work follows the rows there are, not rows times groups."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped_matmul import mxfp4
from pallas_kernels.grouped_matmul.activation import gated


def grouped_matmul(rows_RK, weights, group_sizes_E, *, activation, situ_betas, lora_scale):
    """Goes through the groups that hold rows, and through the tiles of each.

    `weights`: `base` [E, K, F], or packed with `scales`; with adapters `a` and `b`.
    """
    num_groups, _, width = weights["base"].shape
    if rows_RK.shape[0] == 0:
        return jnp.zeros((0, width // (1 if activation is None else 2)), rows_RK.dtype)
    tile_rows = tile_rows_for(rows_RK.shape[0], num_groups)
    mode = _Mode(activation, situ_betas, lora_scale, tile_rows)
    return _grouped_matmul(mode, rows_RK, weights, group_sizes_E)


def tile_rows_for(num_rows: int, num_groups: int) -> int:
    """Rows of a tile: the mean group's size to a power of two, from 16 to 128.

    On 2 CPU cores, 4 to 64 groups of 64 to 256 rows, every size in this range is within 1.5 times
    of the best; small groups waste less in small tiles.
    """
    mean = max(num_rows // num_groups, 1)
    return min(max(16, min(128, 1 << (mean.bit_length() - 1))), num_rows)


class _Mode(NamedTuple):
    """What is static."""

    activation: str | None
    situ_betas: tuple
    lora_scale: float
    tile_rows: int


class _Group(NamedTuple):
    """One group: its number, its first row and the one past its last, and its weights."""

    number: Array
    first: Array
    end: Array
    weights: dict


class _Tile(NamedTuple):
    """`tile_rows` rows from `start`, of which those in `owned_r1` are the tile's."""

    start: Array
    owned_r1: Array


def _each_group(rows_RK, weights, group_sizes_E, one_group, carry):
    """`one_group(group, carry) -> carry` for every group with rows.

    A group's weights are taken, and unpacked, once for all its tiles: beside the arguments there is
    one group's weight at a time.
    """
    sizes_E = group_sizes_E.astype(jnp.int32)
    ends_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    order_E = jnp.argsort(sizes_E == 0, stable=True).astype(jnp.int32)

    def body(i, carry):
        e = order_E[i]
        own = {name: w if name == "a" and w.ndim == 2 else w[e] for name, w in weights.items()}
        if "scales" in own:
            own["base"] = mxfp4.decode(own["base"], own.pop("scales"), rows_RK.dtype)
        return one_group(_Group(e, ends_E[e] - sizes_E[e], ends_E[e], own), carry)

    return lax.fori_loop(0, jnp.sum(sizes_E > 0, dtype=jnp.int32), body, carry)


def _each_tile(group, tile_rows, num_rows, one_tile, carry):
    """`one_tile(tile, carry) -> carry` for the tiles of a group."""

    def body(t, carry):
        first = group.first + t * tile_rows
        # the last tile moves up instead of reading past the rows, and its mask spares others' rows
        start = jnp.clip(first, 0, num_rows - tile_rows)
        row_r = start + jnp.arange(tile_rows, dtype=jnp.int32)
        owned_r1 = ((row_r >= first) & (row_r < group.end))[:, None]
        return one_tile(_Tile(start, owned_r1), carry)

    return lax.fori_loop(0, -(-(group.end - group.first) // tile_rows), body, carry)


def _read(x_RK, tile):
    return lax.dynamic_slice_in_dim(x_RK, tile.start, tile.owned_r1.shape[0], axis=0)


def _write(out_RK, value_rK, tile):
    """Puts the owned rows of a tile into the result, the only place that stores rows."""
    new_rK = jnp.where(tile.owned_r1, value_rK.astype(out_RK.dtype), _read(out_RK, tile))
    return lax.dynamic_update_slice_in_dim(out_RK, new_rK, tile.start, axis=0)


def _dot(a, b, contract, acc):
    """Product over one dim of each, in the wider input dtype, summed in `acc`."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=acc)


def _product(mode, x_rK, weights, acc):
    """x W, with adapters + scale (x A) B; and x A, rounded as the second product takes it."""
    h_rF = _dot(x_rK, weights["base"], (1, 0), acc)
    if "a" not in weights:
        return h_rF, None
    low_rQ = _dot(x_rK, weights["a"], (1, 0), acc).astype(x_rK.dtype)
    return h_rF + mode.lora_scale * _dot(low_rQ, weights["b"], (1, 0), acc), low_rQ


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(mode, rows_RK, weights, group_sizes_E):
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)
    num_rows = rows_RK.shape[0]

    def one_group(group, out_RF):
        def one_tile(tile, out_RF):
            out_rF, _ = _product(mode, _read(rows_RK, tile), group.weights, acc)
            if mode.activation is not None:
                out_rF = gated(out_rF, mode.activation, mode.situ_betas)
            return _write(out_RF, out_rF, tile)

        return _each_tile(group, mode.tile_rows, num_rows, one_tile, out_RF)

    width = weights["base"].shape[2] // (1 if mode.activation is None else 2)
    out_RF = jnp.zeros((num_rows, width), rows_RK.dtype)
    return _each_group(rows_RK, weights, group_sizes_E, one_group, out_RF)


def _grouped_matmul_fwd(mode, rows, weights, group_sizes):
    args = jax.tree.map(lambda p: p.value, (rows, weights, group_sizes))
    # Keys without arrays: they are static, and reach the backward in the residuals' structure.
    floats = (n for n, w in args[1].items() if jnp.issubdtype(w.dtype, jnp.inexact))
    wanted: dict[str, dict] = {name: {} for name in floats if weights[name].perturbed}
    # gate and up are recomputed in the backward: nothing is kept beyond the arguments
    return _grouped_matmul(mode, *args), (args, wanted)


def _grouped_matmul_bwd(mode, residuals, d_out_RF):
    (rows_RK, weights, group_sizes_E), wanted = residuals
    if isinstance(d_out_RF, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)

    def one_group(group, carry):
        d_rows_RK, d_weights = carry
        one_tile = functools.partial(_tile_bwd, mode, rows_RK, d_out_RF, group.weights)
        zeros = {name: jnp.zeros(group.weights[name].shape, acc) for name in wanted}
        d_rows_RK, sums = _each_tile(
            group, mode.tile_rows, rows_RK.shape[0], one_tile, (d_rows_RK, zeros)
        )
        return d_rows_RK, {name: _put(d_weights[name], sums[name], group) for name in wanted}

    def start(name):
        shared = name == "a" and weights[name].ndim == 2
        return jnp.zeros(weights[name].shape, acc if shared else weights[name].dtype)

    init = (jnp.zeros_like(rows_RK), {name: start(name) for name in wanted})
    d_rows_RK, d_weights = _each_group(rows_RK, weights, group_sizes_E, one_group, init)
    grads = {name: None for name in weights}
    grads |= {name: d.astype(weights[name].dtype) for name, d in d_weights.items()}
    return d_rows_RK, grads, None


def _put(total, own, group):
    """A group's gradient in its place, or, of what all groups share, added."""
    if total.ndim == own.ndim:
        return total + own
    return lax.dynamic_update_index_in_dim(total, own.astype(total.dtype), group.number, axis=0)


def _tile_bwd(mode, rows_RK, d_out_RF, weights, tile, carry):
    """Adds what one tile brings: its rows' gradient, and its part of the weights'."""
    d_rows_RK, sums = carry
    dtype, acc = rows_RK.dtype, jnp.promote_types(jnp.float32, rows_RK.dtype)
    # masked on both sides, since 0 * NaN is NaN in the sum over rows
    d_rF = jnp.where(tile.owned_r1, _read(d_out_RF, tile), 0)
    if mode.activation is not None or sums:  # else nobody need compute or keep the rows
        x_rK = jnp.where(tile.owned_r1, _read(rows_RK, tile), 0)
        h_rF, low_rQ = _product(mode, x_rK, weights, acc)
    if mode.activation is not None:
        _, pullback = jax.vjp(lambda h: gated(h, mode.activation, mode.situ_betas), h_rF)
        d_rF = pullback(d_rF.astype(acc))[0].astype(dtype)
    d_x_rK = _dot(d_rF, weights["base"], (1, 1), acc)
    new = {}
    if "base" in sums:
        new["base"] = _dot(x_rK, d_rF, (0, 0), acc)
    if "a" in weights:
        d_low_rQ = (mode.lora_scale * _dot(d_rF, weights["b"], (1, 1), acc)).astype(dtype)
        d_x_rK += _dot(d_low_rQ, weights["a"], (1, 1), acc)
        if "a" in sums:
            new["a"] = _dot(x_rK, d_low_rQ, (0, 0), acc)
        if "b" in sums:
            new["b"] = mode.lora_scale * _dot(low_rQ, d_rF, (0, 0), acc)
    sums = {name: sums[name] + new[name] for name in sums}
    return _write(d_rows_RK, d_x_rK, tile), sums


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd, symbolic_zeros=True)
