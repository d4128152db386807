"""Grouped matmul over tiles of rows: work follows the rows there are, not rows times groups."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from pallas_kernels.grouped_matmul.activation import gated


def grouped_matmul(rows_RK, weights_EKF, group_sizes_E, *, activation, situ_betas):
    """Loops over the tiles that hold rows; each multiplies by its group's weight."""
    if rows_RK.shape[0] == 0:
        width = weights_EKF.shape[2] // (1 if activation is None else 2)
        return jnp.zeros((0, width), rows_RK.dtype)
    tile_rows = tile_rows_for(rows_RK.shape[0], weights_EKF.shape[0])
    mode = (activation, situ_betas, tile_rows)
    return _grouped_matmul(mode, rows_RK, weights_EKF, group_sizes_E)


def tile_rows_for(num_rows: int, num_groups: int) -> int:
    """Rows of a tile: the mean group's size to a power of two, from 16 to 128.

    On 2 CPU cores, 4 to 64 groups of 64 to 256 rows, every size in this range is within 1.5 times
    of the best; small groups waste less in small tiles.
    """
    mean = max(num_rows // num_groups, 1)
    return min(max(16, min(128, 1 << (mean.bit_length() - 1))), num_rows)


class _Tiles(NamedTuple):
    """Tile t reads `tile_rows` rows from starts[t] and owns those in [firsts[t], ends[t])."""

    group: Array
    starts: Array
    firsts: Array
    ends: Array
    used: Array


def _tiles(group_sizes_E, num_rows, tile_rows):
    """Cuts each group into tiles; only the first `used` entries are meant."""
    num_groups = group_sizes_E.shape[0]
    # each nonempty group ends in at most one partial tile
    most = (num_rows + min(num_groups, num_rows) * (tile_rows - 1)) // tile_rows
    sizes_E = group_sizes_E.astype(jnp.int32)
    row_end_E = jnp.cumsum(sizes_E, dtype=jnp.int32)
    tiles_E = -(-sizes_E // tile_rows)
    tile_end_E = jnp.cumsum(tiles_E, dtype=jnp.int32)
    tile_t = jnp.arange(most, dtype=jnp.int32)
    group_t = jnp.searchsorted(tile_end_E, tile_t, side="right", method="compare_all")
    group_t = jnp.minimum(group_t.astype(jnp.int32), num_groups - 1)
    tile_in_group_t = tile_t - (tile_end_E - tiles_E)[group_t]
    first_t = (row_end_E - sizes_E)[group_t] + tile_in_group_t * tile_rows
    end_t = jnp.minimum(jnp.minimum(first_t + tile_rows, row_end_E[group_t]), num_rows)
    # the last tile moves up instead of reading past the rows, and its mask spares others' rows
    start_t = jnp.clip(first_t, 0, num_rows - tile_rows)
    used = jnp.minimum(tile_end_E[-1], most)
    return _Tiles(group_t, start_t, first_t, end_t, used)


def _owned(tiles, t, tile_rows):
    """[tile_rows, 1] True for the rows that tile t owns."""
    row_r = tiles.starts[t] + jnp.arange(tile_rows, dtype=jnp.int32)
    return ((row_r >= tiles.firsts[t]) & (row_r < tiles.ends[t]))[:, None]


def _read(x_RK, tiles, t, tile_rows):
    return lax.dynamic_slice_in_dim(x_RK, tiles.starts[t], tile_rows, axis=0)


def _write(out_RK, value_rK, tiles, t, owned_r1):
    """Puts the owned rows of a tile into the result, the only place that stores rows."""
    old_rK = _read(out_RK, tiles, t, value_rK.shape[0])
    new_rK = jnp.where(owned_r1, value_rK.astype(out_RK.dtype), old_rK)
    return lax.dynamic_update_slice_in_dim(out_RK, new_rK, tiles.starts[t], axis=0)


def _dot(a, b, contract, acc):
    """Product over one dim of each, in the wider input dtype, summed in `acc`."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, preferred_element_type=acc)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(mode, rows_RK, weights_EKF, group_sizes_E):
    activation, situ_betas, tile_rows = mode
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)
    tiles = _tiles(group_sizes_E, rows_RK.shape[0], tile_rows)
    width = weights_EKF.shape[2] // (1 if activation is None else 2)

    def one_tile(t, out_RF):
        out_rF = _dot(_read(rows_RK, tiles, t, tile_rows), weights_EKF[tiles.group[t]], (1, 0), acc)
        if activation is not None:
            out_rF = gated(out_rF, activation, situ_betas)
        return _write(out_RF, out_rF, tiles, t, _owned(tiles, t, tile_rows))

    out_RF = jnp.zeros((rows_RK.shape[0], width), rows_RK.dtype)
    return lax.fori_loop(0, tiles.used, one_tile, out_RF)


def _grouped_matmul_fwd(mode, rows_RK, weights_EKF, group_sizes_E):
    out_RF = _grouped_matmul(mode, rows_RK, weights_EKF, group_sizes_E)
    # gate and up are recomputed in the backward: nothing is kept beyond the arguments
    return out_RF, (rows_RK, weights_EKF, group_sizes_E)


def _grouped_matmul_bwd(mode, residuals, d_out_RF):
    activation, situ_betas, tile_rows = mode
    rows_RK, weights_EKF, group_sizes_E = residuals
    acc = jnp.promote_types(jnp.float32, rows_RK.dtype)
    tiles = _tiles(group_sizes_E, rows_RK.shape[0], tile_rows)

    def one_tile(t, carry):
        d_rows_RK, d_weights_EKF, sum_KF = carry
        group, owned_r1 = tiles.group[t], _owned(tiles, t, tile_rows)
        weight_KF = weights_EKF[group]
        # masked on both sides, since 0 * NaN is NaN in the sum over rows
        x_rK = jnp.where(owned_r1, _read(rows_RK, tiles, t, tile_rows), 0)
        d_rF = jnp.where(owned_r1, _read(d_out_RF, tiles, t, tile_rows), 0)
        if activation is not None:
            h_rF = _dot(x_rK, weight_KF, (1, 0), acc)
            _, pullback = jax.vjp(lambda h: gated(h, activation, situ_betas), h_rF)
            d_rF = pullback(d_rF.astype(acc))[0].astype(rows_RK.dtype)
        d_x_rK = _dot(d_rF, weight_KF, (1, 1), acc)
        # Tiles of a group follow each other, so one group's sum is all that is ever held wide.
        is_new = (t == 0) | (group != tiles.group[jnp.maximum(t - 1, 0)])
        sum_KF = jnp.where(is_new, 0, sum_KF) + _dot(x_rK, d_rF, (0, 0), acc)
        d_weights_EKF = lax.dynamic_update_index_in_dim(
            d_weights_EKF, sum_KF.astype(d_weights_EKF.dtype), group, axis=0
        )
        return _write(d_rows_RK, d_x_rK, tiles, t, owned_r1), d_weights_EKF, sum_KF

    zeros = jnp.zeros_like(rows_RK), jnp.zeros_like(weights_EKF)
    init = (*zeros, jnp.zeros(weights_EKF.shape[1:], acc))
    d_rows_RK, d_weights_EKF, _ = lax.fori_loop(0, tiles.used, one_tile, init)
    return d_rows_RK, d_weights_EKF, None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)
