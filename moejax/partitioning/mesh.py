"""The device mesh: axes ``stage data fsdp expert context tensor``, in this order; its links."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from moejax.config import MESH_AXES, ConfigError, MeshConfig

# What devices of one place (host, slice) speak over, and what places do: by platform.
_LINKS = {"tpu": ("ICI", "DCN"), "gpu": ("NVLink", "network"), "cuda": ("NVLink", "network")}
_SIMULATED = ("memory", "network")


class AxisLinks(NamedTuple):
    """Over what the devices along one mesh axis reach each other.

    Attributes:
      axis, size: name and devices of the axis.
      near: neighbours along it that share a host (GPUs) or a slice (TPUs).
      fast, slow: the links inside a host or slice, and between them.
      place: "host" or "slice".
    """

    axis: str
    size: int
    near: int
    fast: str
    slow: str
    place: str

    def __str__(self) -> str:
        far = self.size // self.near
        if far == 1:
            return f"{self.axis}={self.size} ({self.fast}, one {self.place})"
        if self.near == 1:
            return f"{self.axis}={self.size} ({self.slow} between {far} {self.place}s)"
        return (
            f"{self.axis}={self.size} ({self.fast} among {self.near} of a {self.place}, "
            f"{self.slow} between {far} {self.place}s)"
        )


def make_mesh(cfg: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Mesh over `devices` (all of them if None), sized by the config.

    The last axes change fastest, so ``expert`` and ``fsdp`` neighbours are neighbours on the fast
    network. Where ``mesh.dcn`` says that an axis crosses hosts or slices, that share of it is the
    slow, outer part of a hybrid mesh.

    Raises:
      ConfigError: the sizes do not fit the devices, or ``mesh.dcn`` not their hosts or slices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = cfg.sizes(len(devices))
    dcn = {axis: getattr(cfg.dcn, axis) for axis in MESH_AXES}
    shape = [sizes[axis] for axis in MESH_AXES]
    places = _by_place(devices, math.prod(dcn.values()))
    _check_places(sizes, dcn, places)
    on_tpu = devices[0].platform == "tpu"
    if math.prod(dcn.values()) > 1:
        fast = [sizes[axis] // dcn[axis] for axis in MESH_AXES]
        grid = _hybrid(fast, list(dcn.values()), [_grid(fast, one, on_tpu) for one in places])
    else:
        grid = _grid(shape, devices, on_tpu)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def place_of(device: Any) -> int:
    """The slice of a TPU, the host of any other device."""
    if device.platform == "tpu":
        return getattr(device, "slice_index", None) or 0
    return device.process_index


def _by_place(devices: list[Any], asked: int) -> list[list[Any]]:
    """The devices of every host or slice; simulated ones stand for as many hosts as asked for."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(place_of(device), []).append(device)
    if len(groups) == 1 and devices[0].platform == "cpu" and asked > 1:
        each = len(devices) // asked
        return [devices[start : start + each] for start in range(0, len(devices), each)]
    return [groups[place] for place in sorted(groups)]


def _check_places(sizes: dict[str, int], dcn: dict[str, int], places: list[list[Any]]) -> None:
    """`mesh.dcn` must name as many hosts or slices as there are; without it GPUs need none.

    Raises:
      ConfigError: it names another number, or they differ in size.
    """
    asked, found = math.prod(dcn.values()), len(places)
    name = "slice" if places[0][0].platform == "tpu" else "host"
    counts = sorted({len(one) for one in places})
    if asked > 1 and len(counts) > 1:
        raise ConfigError(
            f"mesh.dcn needs {name}s of equal size, but they have {counts[0]} to {counts[-1]} "
            f"devices. Leave out the odd {name}."
        )
    if asked == found or (asked == 1 and name == "host"):
        return
    set_ones = [f"mesh.dcn.{axis}={n}" for axis, n in dcn.items() if n > 1]
    given = " x ".join(set_ones) + f" asks for {asked}" if set_ones else "mesh.dcn is not set"
    fitting = dcn_choices(sizes, found)
    advice = f"No axis of this mesh can be cut into {found}: change the mesh."
    if found == 1:
        advice = "Set every mesh.dcn to 1."
    elif fitting:
        advice = f"What fits: {'; or '.join(fitting)}."
    raise ConfigError(f"{given}, and there {_are(found, name)}. {advice}")


def _are(count: int, name: str) -> str:
    return f"is 1 {name}" if count == 1 else f"are {count} {name}s"


def dcn_choices(sizes: dict[str, int], places: int, most: int = 3) -> list[str]:
    """Values of ``mesh.dcn`` that lay a mesh over so many hosts or slices.

    Fewest axes first, and of those the outer ones, over which least is sent.
    """
    wide = [axis for axis in MESH_AXES if sizes[axis] > 1]
    found = []
    divisors = [[n for n in range(1, sizes[a] + 1) if not sizes[a] % n] for a in wide]
    for parts in itertools.product(*divisors):
        if math.prod(parts) == places:
            found.append([(a, n) for a, n in zip(wide, parts, strict=True) if n > 1])
    found.sort(key=lambda choice: (len(choice), [MESH_AXES.index(a) for a, _ in choice]))
    return [" ".join(f"mesh.dcn.{axis}={n}" for axis, n in choice) for choice in found[:most]]


def _grid(shape: list[int], devices: list[Any], on_tpu: bool) -> np.ndarray:
    """Devices of one place in a grid; a TPU's along the links of its torus."""
    if on_tpu:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.asarray(devices).reshape(shape)


def _hybrid(fast: list[int], slow: list[int], grids: list[np.ndarray]) -> np.ndarray:
    """The grids of all places with the `slow` factor of every axis outermost."""
    grid = np.stack(grids).reshape(*slow, *fast)
    axes = len(fast)
    paired = [dim for axis in range(axes) for dim in (axis, axes + axis)]
    return grid.transpose(paired).reshape([s * f for s, f in zip(slow, fast, strict=True)])


def near_devices(mesh: Mesh, cfg: MeshConfig | None = None) -> dict[str, int]:
    """Along each axis, how many devices share a host (GPUs) or a slice (TPUs).

    Args:
      cfg: of the mesh; where simulated devices stand for hosts, only it tells.
    """
    places = np.vectorize(place_of, otypes=[int])(mesh.devices)
    near = near_places(places, mesh.axis_names)
    if cfg is not None and mesh.devices.flat[0].platform == "cpu" and not places.any():
        near = {axis: n // getattr(cfg.dcn, axis) for axis, n in near.items()}
    return near


def near_places(places: np.ndarray, axes: Sequence[str]) -> dict[str, int]:
    """The same from the number of every device's host or slice, laid out as the mesh."""
    near = {}
    for i, axis in enumerate(axes):
        lines = np.moveaxis(places, i, 0).reshape(places.shape[i], -1)
        near[axis] = int((lines == lines[:1]).sum(0).min())
    return near


def axis_links(mesh: Mesh, cfg: MeshConfig | None = None) -> list[AxisLinks]:
    """The links of every axis that has more than one device."""
    platform = mesh.devices.flat[0].platform
    fast, slow = _LINKS.get(platform, _SIMULATED)
    place = "slice" if platform == "tpu" else "host"
    near = near_devices(mesh, cfg)
    return [
        AxisLinks(axis, size, near[axis], fast, slow, place)
        for axis, size in mesh.shape.items()
        if size > 1
    ]


def describe_mesh(mesh: Mesh, cfg: MeshConfig | None = None) -> str:
    """A mesh as people read it: its axes, and over which links each one goes."""
    links = axis_links(mesh, cfg)
    if not links:
        return "one device"
    if any(one.near < one.size for one in links):
        return " x ".join(map(str, links))
    shape = " x ".join(f"{one.axis}={one.size}" for one in links)
    where = "simulated on" if links[0].fast == _SIMULATED[0] else f"{links[0].fast} in"
    return f"{shape}, {where} one {links[0].place}"


def num_batch_shards(sizes: dict[str, int]) -> int:
    """Over how many devices the batch is split."""
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]
