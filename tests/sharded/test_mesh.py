"""Order of the devices in a mesh, also where an axis crosses hosts."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from moejax.config import MESH_AXES, ConfigError, MeshConfig
from moejax.config.mesh import DcnConfig
from moejax.partitioning import describe_mesh, make_mesh, near_devices, num_batch_shards
from moejax.partitioning import mesh as mesh_module
from moejax.partitioning.mesh import place_of


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


def devices(platform: str, places: int, each: int, *, mixed: bool = False) -> list:
    """Devices of several hosts (gpu) or slices (tpu), as JAX would list them or `mixed`."""
    listed = []
    for i in range(places * each):
        place = i % places if mixed else i // each
        where = {"process_index": place, "slice_index": None}
        if platform == "tpu":
            inside = i // places if mixed else i % each
            where = {"process_index": i, "slice_index": place, "coords": (inside, 0, 0),
                     "core_on_chip": 0, "device_kind": "TPU v5"}  # fmt: skip
        listed.append(SimpleNamespace(id=i, platform=platform, **where))
    return listed


@pytest.fixture
def plain_mesh(monkeypatch):
    """`make_mesh` over devices that are no devices."""

    def mesh(grid, axis_names, **_):
        shape = dict(zip(axis_names, grid.shape, strict=True))
        return SimpleNamespace(devices=grid, axis_names=axis_names, shape=shape)

    monkeypatch.setattr(mesh_module, "Mesh", mesh)
    return make_mesh


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_hosts_or_slices_are_kept_together(plain_mesh, platform):
    """Devices listed across hosts: the fast part of every axis stays inside a host or slice."""
    cfg = MeshConfig(fsdp=4, expert=2, dcn=DcnConfig(fsdp=2))
    mesh = plain_mesh(cfg, devices(platform, 2, 4, mixed=True))
    grid = mesh.devices.reshape(4, 2)
    places = np.vectorize(place_of)(grid)
    np.testing.assert_array_equal(places, [[0, 0], [0, 0], [1, 1], [1, 1]])
    assert sorted(device.id for device in grid.ravel()) == list(range(8))
    assert near_devices(mesh)["fsdp"] == near_devices(mesh)["expert"] == 2


@pytest.mark.parametrize(
    ("platform", "places", "sizes", "dcn", "shown"),
    [
        ("gpu", 16, {"fsdp": 2, "expert": 64}, {"fsdp": 2, "expert": 8},
         "fsdp=2 (network between 2 hosts) x "
         "expert=64 (NVLink among 8 of a host, network between 8 hosts)"),
        # Without mesh.dcn the devices stand in their own order.
        ("gpu", 4, {"data": 2, "fsdp": 2, "expert": 8}, {},
         "data=2 (network between 2 hosts) x fsdp=2 (network between 2 hosts) x "
         "expert=8 (NVLink, one host)"),
        ("gpu", 1, {"fsdp": 2, "expert": 4}, {}, "fsdp=2 x expert=4, NVLink in one host"),
        ("tpu", 2, {"data": 2, "fsdp": 8}, {"data": 2},
         "data=2 (DCN between 2 slices) x fsdp=8 (ICI, one slice)"),
        ("cpu", 1, {"fsdp": 4, "expert": 2}, {"fsdp": 2},
         "fsdp=4 (memory among 2 of a host, network between 2 hosts) x "
         "expert=2 (memory, one host)"),
        ("cpu", 1, {"fsdp": 8}, {}, "fsdp=8, simulated on one host"),
        ("cpu", 1, {"fsdp": 1}, {}, "one device"),
    ],
)  # fmt: skip
def test_a_mesh_says_which_links_its_axes_use(plain_mesh, platform, places, sizes, dcn, shown):
    cfg = MeshConfig(**{"fsdp": 1} | sizes, dcn=DcnConfig(**dcn))
    count = int(np.prod(list(sizes.values())))
    mesh = plain_mesh(cfg, devices(platform, places, count // places))
    assert describe_mesh(mesh, cfg) == shown


@pytest.mark.parametrize(
    ("platform", "places", "sizes", "dcn", "says"),
    [
        ("gpu", 4, {"fsdp": 4, "expert": 8}, {"fsdp": 2},
         "mesh.dcn.fsdp=2 asks for 2, and there are 4 hosts. What fits: mesh.dcn.fsdp=4; or "
         "mesh.dcn.expert=4; or mesh.dcn.fsdp=2 mesh.dcn.expert=2."),
        ("gpu", 1, {"data": 2, "fsdp": 4}, {"data": 2},
         "mesh.dcn.data=2 asks for 2, and there is 1 host. Set every mesh.dcn to 1."),
        ("tpu", 2, {"data": 2, "fsdp": 8}, {},
         "mesh.dcn is not set, and there are 2 slices. What fits: mesh.dcn.data=2; or "
         "mesh.dcn.fsdp=2."),
        ("tpu", 3, {"fsdp": 6, "expert": 2}, {"expert": 2},
         "mesh.dcn.expert=2 asks for 2, and there are 3 slices. What fits: mesh.dcn.fsdp=3."),
        ("tpu", 3, {"fsdp": 3, "expert": 1}, {}, "mesh.dcn is not set, and there are 3 slices."),
        ("tpu", 4, {"fsdp": 2, "expert": 2}, {"fsdp": 2},
         "there are 4 slices. What fits: mesh.dcn.fsdp=2 mesh.dcn.expert=2."),
    ],
)  # fmt: skip
def test_other_numbers_of_hosts_or_slices_are_refused(platform, places, sizes, dcn, says):
    count = int(np.prod(list(sizes.values())))
    cfg = MeshConfig(**sizes, dcn=DcnConfig(**dcn))
    with pytest.raises(ConfigError) as refused:
        make_mesh(cfg, devices(platform, places, count // places))
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_hosts_of_unequal_size_are_refused():
    listed = devices("gpu", 2, 4)
    listed[4].process_index = 0
    with pytest.raises(ConfigError, match="hosts of equal size, but they have 3 to 5 devices"):
        make_mesh(MeshConfig(fsdp=8, dcn=DcnConfig(fsdp=2)), listed)


def test_refusals_name_the_axis():
    with pytest.raises(
        ConfigError, match=r"mesh.dcn.fsdp=2 does not divide mesh.fsdp=1. Use one of 1."
    ):
        make_mesh(MeshConfig(fsdp=1, expert=8, dcn=DcnConfig(fsdp=2)))
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        make_mesh(MeshConfig(fsdp=3))
    with pytest.raises(ConfigError, match="leaves 2 axes at -1"):
        make_mesh(MeshConfig(fsdp=-1, expert=-1))
    with pytest.raises(ConfigError, match="does not fit 4 devices: its fixed axes take 8"):
        make_mesh(MeshConfig(fsdp=8), jax.devices()[:4])
