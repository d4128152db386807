"""State in host memory that visits the devices a layer at a time.

An array lies in host memory when its sharding has the memory kind `pinned_host`: each device's
share in the memory of its host. Inside a program it has a type of its own, `float32<host>[...]`:
only slices of it are taken, and `jax.device_put` brings them over. Written back by
`dynamic_update_slice`, they end in the very buffer they came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

PINNED = "pinned_host"  # the memory that devices copy from and to beside their compute
Tree = Any


def to_device(tree: Tree) -> Tree:
    """The arrays in device memory; those that are there already are not copied. Inside jit."""
    return jax.device_put(tree, jax.memory.Space.Device)


def to_host(tree: Tree) -> Tree:
    """The arrays in host memory. Inside jit."""
    return jax.device_put(tree, jax.memory.Space.Host)


def on_host(leaf: Any) -> bool:
    """Whether a value is an array in host memory."""
    return isinstance(leaf, jax.Array) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


def brought(tree: Tree) -> Tree:
    """Leaves in host memory moved to the device, the others as they are."""
    return jax.tree.map(lambda leaf: to_device(leaf) if on_host(leaf) else leaf, tree)


def place(where: NamedSharding, hosted: bool) -> NamedSharding:
    """The sharding, in host memory where `hosted`.

    Of a GPU that is not here it stays as it is: XLA lists no memories of it, and JAX then drops the
    kind without a word. Shapes to compile for get it by :func:`abstract_array`.
    """
    return where.with_memory_kind(PINNED) if hosted else where


def abstract_array(leaf: Any, where: NamedSharding, hosted: bool) -> jax.ShapeDtypeStruct:
    """A leaf's shape, dtype and place; for `jit(...).lower`, under `jax.set_mesh` of its mesh."""
    if hosted and where.memory_kind != PINNED:
        where = NamedSharding(where.mesh.abstract_mesh, where.spec, memory_kind=PINNED)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def take_layer(tree: Tree, index: tuple[Any, ...]) -> Tree:
    """One layer of leaves [*lead, ...] at `index`, in device memory."""
    return to_device(jax.tree.map(lambda leaf: _slice(leaf, index), tree))


def _slice(leaf: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    rest = leaf.shape[len(index) :]
    start = (*index, *(jnp.int32(0) for _ in rest))
    return jax.lax.dynamic_slice(leaf, start, (*(1 for _ in index), *rest)).reshape(rest)


def _write(leaf: jax.Array, new: jax.Array, index: tuple[Any, ...]) -> jax.Array:
    new = to_host(new) if on_host(leaf) else new
    start = (*index, *(jnp.int32(0) for _ in new.shape))
    return jax.lax.dynamic_update_slice(leaf, new.reshape(*(1 for _ in index), *new.shape), start)


def update_layers(
    step: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    lead: tuple[int, ...],
    changed: Tree,
    read: Tree,
    shared: Tree,
) -> tuple[Tree, Tree]:
    """Changes stacked leaves one layer after the other, in place.

    Args:
      step: ``(changed, read, shared) -> (changed, shared)`` of one layer, all in device memory; of
        the arguments `shared` is the same at every layer, of the results the last layer's counts.
      lead: dims that stack the layers; () for leaves that are no stack.
      changed: leaves [*lead, ...] in host or device memory; they stay where they are.
      read: leaves [*lead, ...].
      shared: leaves that belong to no layer.
    Returns:
      `changed` and `shared` after all layers. Beside the stacks one layer of `changed` is in device
      memory at a time.
    """

    def layer(number: Any, carry: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        changed = carry[0]
        index = tuple(jnp.asarray(i, jnp.int32) for i in _unravel(number, lead))
        new, out = step(take_layer(changed, index), take_layer(read, index), shared)
        return jax.tree.map(lambda a, b: _write(a, b, index), changed, new), out

    if math.prod(lead) == 1:
        return layer(0, (changed, shared))
    return jax.lax.fori_loop(0, math.prod(lead), layer, (changed, shared))


def _unravel(number: Any, lead: tuple[int, ...]) -> list[Any]:
    """Indices of a flat number in dims `lead`."""
    indices: list[Any] = []
    for size in reversed(lead):
        number, rest = number // size, number % size
        indices.insert(0, rest)
    return indices
