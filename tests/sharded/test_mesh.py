"""Order of the devices in a mesh, also where an axis crosses hosts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moejax.config import MESH_AXES, ConfigError, MeshConfig
from moejax.config.run import DcnConfig
from moejax.partitioning import make_mesh, num_batch_shards
from moejax.partitioning.mesh import _hybrid


def ids(mesh, *axes: str) -> np.ndarray:
    """Device ids of a mesh with only these axes left."""
    grid = np.vectorize(lambda device: device.id)(mesh.devices)
    return grid.reshape([mesh.shape[axis] for axis in axes])


def test_axes_and_order():
    mesh = make_mesh(MeshConfig(data=2, fsdp=-1, expert=2))
    assert mesh.axis_names == MESH_AXES
    assert dict(mesh.shape) == dict(zip(MESH_AXES, (1, 2, 2, 2, 1, 1), strict=True))
    np.testing.assert_array_equal(
        ids(mesh, "data", "fsdp", "expert"), np.arange(8).reshape(2, 2, 2)
    )
    assert num_batch_shards(dict(mesh.shape)) == 8


def test_dcn_is_the_outer_part_of_its_axis():
    """Two hosts of four devices: the fsdp axis steps inside a host first, then crosses."""
    mesh = make_mesh(MeshConfig(fsdp=4, expert=2, dcn=DcnConfig(fsdp=2)))
    np.testing.assert_array_equal(ids(mesh, "fsdp", "expert"), np.arange(8).reshape(4, 2))
    # An inner axis that crosses hosts: neighbours along `data` then stay on a host.
    mesh = make_mesh(MeshConfig(data=2, fsdp=1, expert=4, dcn=DcnConfig(expert=2)))
    np.testing.assert_array_equal(ids(mesh, "data", "expert"), [[0, 1, 4, 5], [2, 3, 6, 7]])
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, expert=2, dcn=DcnConfig(data=2, expert=2)))
    np.testing.assert_array_equal(
        ids(mesh, "data", "fsdp", "expert"), [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    )


@pytest.mark.parametrize("name", ["process_index", "slice_index"])
def test_hosts_or_slices_are_kept_together(name):
    """Devices listed across hosts: the fast part of every axis stays inside a host or slice."""
    other = {"process_index": 0} if name == "slice_index" else {}
    devices = [SimpleNamespace(id=i, **other, **{name: i % 2}) for i in range(8)]
    fast, slow = [1, 1, 2, 2, 1, 1], [1, 1, 2, 1, 1, 1]
    grid = _hybrid(fast, slow, devices).reshape(4, 2)
    hosts = np.vectorize(lambda device: getattr(device, name))(grid)
    np.testing.assert_array_equal(hosts, [[0, 0], [0, 0], [1, 1], [1, 1]])
    assert sorted(device.id for device in grid.ravel()) == list(range(8))


def test_refusals_name_the_axis():
    with pytest.raises(ConfigError, match=r"mesh.dcn.fsdp=2 does not divide mesh.fsdp=1"):
        make_mesh(MeshConfig(fsdp=1, expert=8, dcn=DcnConfig(fsdp=2)))
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        make_mesh(MeshConfig(fsdp=3))
    with pytest.raises(ConfigError, match="leaves 2 axes at -1"):
        make_mesh(MeshConfig(fsdp=-1, expert=-1))
    with pytest.raises(ConfigError, match="does not fit 4 devices: its fixed axes take 8"):
        make_mesh(MeshConfig(fsdp=8), jax.devices()[:4])
