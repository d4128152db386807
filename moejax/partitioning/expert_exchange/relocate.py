"""Moving experts to other slots in place: each device sends the experts that leave it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.partitioning.expert_exchange.collective import Link, blank_rows, ragged_all_to_all
from moejax.partitioning.expert_exchange.plan import turn_runs


def relocate(x: jax.Array, source_XE: jax.Array, dim: int, where: NamedSharding) -> jax.Array:
    """`x` with other experts in its slots: slot s of layer i takes what is in `source[i, s]`.

    Bits move, nothing is computed. One layer is on the wire at a time: beside `x` a device holds
    three times its share of one layer, so donate `x`.

    Args:
      x: an array of stacked layers, experts on dim `dim` behind them, stored as `where`.
      source_XE: int32, a permutation of the slots for each layer.
      dim: the dim of the experts.
      where: sharding of `x`; those of its axes that lie on `dim` carry the exchange.
    Returns:
      An array like `x`, stored alike.
    """
    spec = tuple(where.spec) + (None,) * (x.ndim - len(where.spec))
    entry = spec[dim]
    axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
    platform = where.mesh.devices.flat[0].platform
    move = functools.partial(_move, link=Link(axes, native=platform != "cpu") if axes else None)

    def per_device(x, source_XE):
        layers = x.reshape(-1, *x.shape[dim:])
        sources = source_XE.reshape(-1, source_XE.shape[-1])

        def one(i, layers):
            return layers.at[i].set(move(layers[i], sources[i]))

        return lax.fori_loop(0, layers.shape[0], one, layers).reshape(x.shape)

    mine, layers_of = P(*spec), P(*spec[:dim])
    moved = jax.shard_map(
        per_device, mesh=where.mesh, in_specs=(mine, layers_of), out_specs=mine, check_vma=False
    )
    return moved(x, source_XE.reshape(*x.shape[:dim], -1))


def _move(x_e: jax.Array, source_E: jax.Array, link: Link | None) -> jax.Array:
    """This device's slots [e, ...] of one layer after the move."""
    if link is None:
        return x_e[source_E]
    num_local, num_slots = x_e.shape[0], source_E.shape[0]
    ranks, me = num_slots // num_local, lax.axis_index(link.axis)
    slots_E = jnp.arange(num_slots, dtype=jnp.int32)
    target_E = jnp.zeros_like(source_E).at[source_E].set(slots_E)
    # In the terms of the token exchange: a row a slot, sent to the device of the slot it goes to.
    counts_PE = (source_E // num_local == jnp.arange(ranks)[:, None]).astype(jnp.int32)
    there, _ = turn_runs(counts_PE, me, 0, num_local)
    leaving_e = lax.dynamic_slice(target_E, (me * num_local,), (num_local,))
    arriving_e = lax.dynamic_slice(source_E, (me * num_local,), (num_local,))
    rows_eW = x_e.reshape(num_local, -1)[jnp.argsort(leaving_e)]
    come_eW = ragged_all_to_all(rows_eW, blank_rows(num_local, rows_eW), there, link)
    # They come by sender, of each in the order of their new slots.
    order_e = jnp.argsort(arriving_e // num_local, stable=True)
    return jnp.zeros_like(come_eW).at[order_e].set(come_eW).reshape(x_e.shape)
