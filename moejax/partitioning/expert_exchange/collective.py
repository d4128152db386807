"""Ragged all-to-all on every platform, with its own gradient."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.partitioning.expert_exchange.plan import Runs


class Link(NamedTuple):
    """A mesh axis, and whether its devices have the ragged all-to-all.

    Known when the exchange is traced: a choice left to the lowering stays in the compiled loop as a
    conditional, across which nothing overlaps.
    """

    axis: str
    native: bool


def ragged_all_to_all(operand_NL, output_ML, runs: Runs, link: Link) -> jax.Array:
    """`lax.ragged_all_to_all`, and where XLA has none (CPU) the same from other collectives.

    Args:
      operand_NL: rows to send.
      output_ML: rows of the result that nothing is written to.
      runs: one run a device.
    Returns:
      [M, L].
    """
    if link.native:
        return lax.ragged_all_to_all(operand_NL, output_ML, *runs, axis_name=link.axis)
    return emulated(operand_NL, output_ML, runs, link.axis)


def emulated(operand_NL, output_ML, runs: Runs, axis: str) -> jax.Array:
    """Ragged all-to-all by gathering every device's operand: for tests and small runs.

    Stricter than the real one: where sender and receiver disagree on a size, or a run leaves its
    array, the whole result is NaN instead of undefined.
    """
    num_in, num_out = operand_NL.shape[0], output_ML.shape[0]
    swap = functools.partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0)
    from_P, sizes_P, to_P = (swap(a, tiled=True) for a in runs[:3])
    all_PNL = lax.all_gather(operand_NL, axis)
    lane_PM = jnp.arange(num_out, dtype=jnp.int32) - to_P[:, None]
    inside_PM = (lane_PM >= 0) & (lane_PM < sizes_P[:, None])
    sender_M = jnp.argmax(inside_PM, 0)
    row_M = from_P[sender_M] + jnp.take_along_axis(lane_PM, sender_M[None], 0)[0]
    out_ML = jnp.where(inside_PM.any(0)[:, None], all_PNL[sender_M, row_M], output_ML)
    broken = (sizes_P != runs.recv_sizes) | (jnp.minimum(jnp.minimum(from_P, to_P), sizes_P) < 0)
    broken |= (from_P + sizes_P > num_in) | (to_P + sizes_P > num_out)
    return jnp.where(broken.any(), jnp.nan, out_ML).astype(output_ML.dtype)


def blank_rows(num_rows: int, like: jax.Array) -> jax.Array:
    """Rows that something else masks or overwrites before they are read."""
    return jnp.zeros((num_rows, like.shape[1]), like.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def fetch_rows(rows_RL, there: Runs, back: Runs, link: Link, num_slots: int) -> jax.Array:
    """Rows of all devices that are for this one, in a buffer of `num_slots`."""
    return ragged_all_to_all(rows_RL, blank_rows(num_slots, rows_RL), there, link)


def _fetch_fwd(rows_RL, there, back, link, num_slots):
    # the last residual carries a length, and its zeros are free
    length = jnp.zeros((rows_RL.shape[0], 0), jnp.int8)
    return fetch_rows(rows_RL, there, back, link, num_slots), (back, length)


def _fetch_bwd(link, num_slots, residuals, dslots_CL):
    back, length = residuals
    # Zeros, not blank rows: a row that was not sent this turn has a gradient of 0.
    zeros_RL = jnp.zeros((length.shape[0], dslots_CL.shape[1]), dslots_CL.dtype)
    return ragged_all_to_all(dslots_CL, zeros_RL, back, link), None, None


fetch_rows.defvjp(_fetch_fwd, _fetch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def return_rows(slots_CL, rows_RL, there: Runs, back: Runs, link: Link) -> jax.Array:
    """`rows_RL` with the results of this turn's rows written over their places.

    The gradient passes `rows_RL` by: every row is the result of one turn, so what a turn wrote over
    was never read and has no gradient to lose.
    """
    return ragged_all_to_all(slots_CL, rows_RL, back, link)


def _return_fwd(slots_CL, rows_RL, there, back, link):
    length = jnp.zeros((slots_CL.shape[0], 0), jnp.int8)
    return return_rows(slots_CL, rows_RL, there, back, link), (there, length)


def _return_bwd(link, residuals, drows_RL):
    there, length = residuals
    blank_CL = blank_rows(length.shape[0], drows_RL)
    return ragged_all_to_all(drows_RL, blank_CL, there, link), drows_RL, None, None


return_rows.defvjp(_return_fwd, _return_bwd)
