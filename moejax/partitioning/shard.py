"""From logical axes to shardings: of parameters, of values inside a step, of per-device code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.partitioning.param_info import ParamInfo
from moejax.partitioning.rules import (
    BATCH_AXES,
    COMPUTE,
    MeshAxes,
    fit_spec,
    spec_for,
    stored_layout,
)
from pallas_kernels.choose import target_platform


def active_mesh() -> jax.sharding.AbstractMesh | None:
    """The mesh set by ``jax.set_mesh`` when automatic sharding is in force.

    None outside it and inside shard_map.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return None
    return mesh


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`x` laid out as the COMPUTE table says for its logical `axes`.

    Unchanged where no mesh is active.
    """
    mesh = active_mesh()
    if mesh is None:
        return x
    spec = fit_spec(spec_for(axes, COMPUTE), x.shape, dict(mesh.shape))
    return jax.lax.with_sharding_constraint(x, spec)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """A stored weight in its COMPUTE layout; its gradient goes straight back to the stored one.

    The transpose of a mere constraint would ask for the gradient in the COMPUTE layout first:
    every device would be sent the whole sum, to keep its own share of it.
    """
    for layout in reversed(_layouts_between(x, axes)):
        x = jax.lax.with_sharding_constraint(x, layout)
    return constrain(x, axes)


def _gather_fwd(x, axes):
    return gather(x, axes), None


def _gather_bwd(axes, _, dx):
    mesh = active_mesh()
    if mesh is None:
        return (dx,)
    for layout in _layouts_between(dx, axes):
        dx = jax.lax.with_sharding_constraint(dx, layout)
    return (jax.lax.with_sharding_constraint(dx, stored_layout(axes, dx.shape, dict(mesh.shape))),)


def _layouts_between(x: jax.Array, axes: tuple[str | None, ...]) -> list[P]:
    """Layouts between the COMPUTE and the stored one, a mesh axis more in each; none but on TPUs.

    A TPU's compiler makes an all-reduce of a gather over a whole torus of 64 chips: twice the
    bytes, and compute waits for it. Over one mesh axis after the other it stays a gather.
    """
    mesh = active_mesh()
    if mesh is None or target_platform() != "tpu":
        return []
    sizes = dict(mesh.shape)
    stored = stored_layout(axes, x.shape, sizes)
    used = fit_spec(spec_for(axes, COMPUTE), x.shape, sizes)
    layouts, entries = [], [_wide(entry, sizes) for entry in used]
    for dim, entry in enumerate(stored):
        for axis in _wide(entry, sizes):
            if axis not in entries[dim]:
                entries[dim] = (*entries[dim], axis)
                layouts.append(P(*(kept or None for kept in entries)))
    return layouts[:-1]


def _wide(entry: MeshAxes, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes of one dim that have more than one device."""
    return tuple(a for a in ((entry,) if isinstance(entry, str) else entry or ()) if sizes[a] > 1)


gather.defvjp(_gather_fwd, _gather_bwd)


def stored_spec(info: ParamInfo, shape: tuple[int, ...], sizes: dict[str, int]) -> P:
    """Where a parameter lives between steps.

    Its stacked-layer dims whole, the rest by the STORED table.
    """
    axes = ("layers",) * min(info.stack, 1) + (None,) * (info.stack - 1) + info.axes
    return stored_layout(axes, shape, sizes)


def shardings_for(infos: Any, abstract: Any, mesh: Mesh) -> Any:
    """NamedSharding of every parameter, from its ParamInfo and abstract value."""
    sizes = dict(mesh.shape)
    return jax.tree.map(
        lambda info, leaf: NamedSharding(mesh, stored_spec(info, leaf.shape, sizes)),
        infos,
        abstract,
        is_leaf=lambda node: isinstance(node, ParamInfo),
    )


def batch_local(
    fn: Callable,
    batch_dims: tuple[int | None, ...],
    *,
    out_dim: int = 0,
    weights: Mapping[int, tuple[str | None, ...]] | None = None,
) -> Callable:
    """`fn` run per device on its own rows of the batch.

    Per-row operators are wrapped in this so that no partitioner has to guess how to split their
    loops, and so that kernels see local shapes. With no active mesh it is `fn` itself.

    Args:
      fn: positional arguments only; its results all carry the batch.
      batch_dims: which dim of each argument counts rows; None (or past the end) for an argument
        that is whole.
      out_dim: which dim of every result counts rows.
      weights: logical axes of arguments that are stored weights, by place. They are gathered
        inside, so that their gradients are scattered: that of a whole argument is summed on every
        device.
    """
    weights = weights or {}

    def rows(dim: int | None) -> P:
        return P() if dim is None else P(*(None,) * dim, BATCH_AXES)

    def wrapped(*args):
        mesh = active_mesh()
        if mesh is None:
            return fn(*args)
        dims = tuple(batch_dims) + (None,) * (len(args) - len(batch_dims))
        specs = [rows(dim) for dim in dims]
        for place, axes in weights.items():
            specs[place] = stored_layout(axes, args[place].shape, dict(mesh.shape))

        def local(*args):
            whole = [gathered(a, specs[i]) if i in weights else a for i, a in enumerate(args)]
            return fn(*whole)

        mapped = jax.shard_map(
            local, in_specs=tuple(specs), out_specs=rows(out_dim), check_vma=False
        )
        return mapped(*args)

    return wrapped


def gathered(x: jax.Array, layout: P, *, but: str | None = None) -> jax.Array:
    """A device's part of a value, whole but for one mesh axis; for use inside shard_map.

    Gathered here and not by the partitioner, so that the gradient leaves by the transpose, a
    reduce-scatter: of a value that enters shard_map whole, every device would be sent all of it.
    The shards arrive one behind the other, which for dim 0 is their order already.

    Args:
      x: the part.
      layout: mesh axes of its dims.
      but: an axis along which it stays a part.
    """
    for dim, entry in enumerate(layout):
        for axis in reversed((entry,) if isinstance(entry, str) else entry or ()):
            if axis != but:
                shards = jax.lax.all_gather(x, axis)
                shape = (*x.shape[:dim], -1, *x.shape[dim + 1 :])
                x = jnp.moveaxis(shards, 0, dim).reshape(shape)
    return x
