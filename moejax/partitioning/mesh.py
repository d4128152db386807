"""The device mesh: axes ``stage data fsdp expert context tensor``, in this order."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from moejax.config import MESH_AXES, MeshConfig


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over `devices` (all of them if None), sized by the config.

    The last axes change fastest, so ``expert`` and ``fsdp`` neighbours are neighbours on the fast
    network. Where ``mesh.dcn`` says that an axis crosses hosts or slices, that share of it is the
    slow, outer part of a hybrid mesh.

    Raises:
      ConfigError: the sizes do not fit the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = cfg.sizes(len(devices))
    dcn = [getattr(cfg.dcn, axis) for axis in MESH_AXES]
    shape = [sizes[axis] for axis in MESH_AXES]
    if math.prod(dcn) > 1:
        grid = _hybrid([n // d for n, d in zip(shape, dcn, strict=True)], dcn, devices)
    elif devices[0].platform == "tpu":
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _hybrid(fast: list[int], slow: list[int], devices: list[jax.Device]) -> np.ndarray:
    """Devices with the `slow` factor of every axis outermost.

    Groups are hosts or slices where devices tell them.
    """
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        slice_index = getattr(device, "slice_index", None)
        groups.setdefault(device.process_index if slice_index is None else slice_index, []).append(
            device
        )
    if len(groups) == math.prod(slow) and len({len(g) for g in groups.values()}) == 1:
        ordered = [device for key in sorted(groups) for device in groups[key]]
    else:
        ordered = devices  # one host standing in for many: cut the list into equal runs
    grid = np.asarray(ordered).reshape(*slow, *fast)
    axes = len(fast)
    paired = [dim for axis in range(axes) for dim in (axis, axes + axis)]
    return grid.transpose(paired).reshape([s * f for s, f in zip(slow, fast, strict=True)])


def num_batch_shards(sizes: dict[str, int]) -> int:
    """Over how many devices the batch is split."""
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]
