"""Ragged all-to-all on every platform, with its own gradient."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.partitioning.expert_exchange.plan import Runs


class Link(NamedTuple):
    """The devices that exchange: those of a mesh axis, or groups of them.

    Attributes:
      axis: of the mesh, or several as one; its devices lie host by host.
      native: whether they have the ragged all-to-all. Known when the exchange is traced: a choice
        left to the lowering stays in the compiled loop as a conditional, across which nothing
        overlaps.
      hosts: how many hosts share the axis.
      near: devices of the axis in one host; of no account where there is one host.
      part: "all" devices exchange, those at the same place of every host ("across"), or those
        "inside" a host.
    """

    axis: str | tuple[str, ...]
    native: bool
    hosts: int = 1
    near: int = 1
    part: str = "all"

    @property
    def groups(self) -> list[list[int]] | None:
        """Places on the axis that exchange with each other, as collectives take them."""
        table = [[h * self.near + i for i in range(self.near)] for h in range(self.hosts)]
        if self.part == "across":
            return [list(group) for group in zip(*table, strict=True)]
        return table if self.part == "inside" else None

    def me(self) -> jax.Array:
        """This device's place in its group."""
        place = lax.axis_index(self.axis)
        if self.part == "across":
            return place // self.near
        return place % self.near if self.part == "inside" else place

    def leaves_host(self, ranks: int) -> jax.Array:
        """Which of the `ranks` places of this device's group are on another host: bool [P]."""
        place_P = jnp.arange(ranks, dtype=jnp.int32)
        if self.part == "inside" or self.hosts == 1:
            return jnp.zeros(ranks, bool)
        near = self.near if self.part == "all" else 1
        return place_P // near != self.me() // near

    def swap(self, x_P: jax.Array) -> jax.Array:
        """Part p of every device goes to place p of its group."""
        return lax.all_to_all(
            x_P, self.axis, split_axis=0, concat_axis=0, tiled=True, axis_index_groups=self.groups
        )

    def gather(self, x: jax.Array) -> jax.Array:
        """[P, ...]: everyone's, by place in the group."""
        return lax.all_gather(x, self.axis, axis_index_groups=self.groups)


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
        return lax.ragged_all_to_all(
            operand_NL, output_ML, *runs, axis_name=link.axis, axis_index_groups=link.groups
        )
    return emulated(operand_NL, output_ML, runs, link)


def emulated(operand_NL, output_ML, runs: Runs, link: Link) -> jax.Array:
    """Ragged all-to-all by gathering every device's operand: for tests and small runs.

    Stricter than the real one: where sender and receiver disagree on a size, or a run leaves its
    array, the whole result is NaN instead of undefined.
    """
    num_in, num_out = operand_NL.shape[0], output_ML.shape[0]
    from_P, sizes_P, to_P = map(link.swap, runs[:3])
    all_PNL = link.gather(operand_NL)
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
