"""Copies of busy experts: fetched from their owner inside the step, gradients summed back to it."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.partitioning.expert_exchange.collective import Link, fetch_rows
from moejax.partitioning.expert_exchange.plan import turn_runs


class Copies(NamedTuple):
    """Which experts are repeated where.

    Attributes:
      sources_K: int32, for the places of all devices one after the other, the slot of the expert
        that each repeats; E for none.
      most: copies of one expert, at most.
    """

    sources_K: jax.Array
    most: int


def with_copies(weights, copies: Copies, link: Link, shared=None):
    """This device's experts and, behind them, the ones it repeats.

    Args:
      weights: pytree of the device's own experts [e, ...].
      copies: the same on every device.
      link: of the devices that share the experts.
      shared: which leaves have no dim of experts, in the structure of `weights`; they stay as they
        are. None: none of them.
    Returns:
      pytree of [e + K / devices, ...]; 0 in an empty place. Its gradient adds that of every copy
      to the owner's.
    """
    sources_K = copies.sources_K
    leaves, kind = jax.tree.flatten(weights)
    whole = [False] * len(leaves) if shared is None else jax.tree.leaves(shared)
    num_local = leaves[whole.index(False)].shape[0]
    ranks, me = lax.axis_size(link.axis), lax.axis_index(link.axis)
    num_copies = sources_K.shape[0] // ranks
    owner_K = sources_K // num_local  # `ranks` for none
    counts_PK = (owner_K == jnp.arange(ranks)[:, None]).astype(jnp.int32)
    there, back = turn_runs(counts_PK, me, 0, num_copies)
    num_rows = min(sources_K.shape[0], copies.most * num_local)
    (wanted_R,) = jnp.nonzero(owner_K == me, size=num_rows, fill_value=0)
    row_R = jnp.clip(sources_K[wanted_R] - me * num_local, 0, num_local - 1)
    mine_c = lax.dynamic_slice(owner_K, (me * num_copies,), (num_copies,))
    place_c = jnp.argsort(mine_c, stable=True)  # they come by sender, and of each in order

    def one(weight_e: jax.Array) -> jax.Array:
        # In parts: the rows to send are together as large as all copies of all devices.
        rows_eW = weight_e.reshape(num_local, -1)
        parts = math.gcd(rows_eW.shape[1], ranks)
        parts_neW = rows_eW.reshape(num_local, parts, -1).swapaxes(0, 1)

        def fetch(_, part_eW):
            come_cW = fetch_rows(part_eW[row_R], there, back, link, num_copies)
            return None, jnp.zeros_like(come_cW).at[place_c].set(come_cW)

        _, come_ncW = lax.scan(fetch, None, parts_neW)
        copies_c = come_ncW.swapaxes(0, 1).reshape(num_copies, *weight_e.shape[1:])
        return jnp.concatenate([weight_e, copies_c])

    all_leaves = [w if is_whole else one(w) for w, is_whole in zip(leaves, whole, strict=True)]
    return jax.tree.unflatten(kind, all_leaves)
