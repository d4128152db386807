"""From logical axes to layouts: tables, what fits, meshes, what a whole model's weights become."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import kimi_k3
from moejax.config import MESH_AXES, ConfigError, MeshConfig, ModelConfig, build_section
from moejax.config.mesh import DcnConfig
from moejax.models.parts import flat_infos, model_parts
from moejax.partitioning import (
    BATCH_AXES,
    COMPUTE,
    STORED,
    ParamInfo,
    active_mesh,
    batch_local,
    constrain,
    fit_spec,
    make_mesh,
    num_batch_shards,
    shardings_for,
    spec_for,
    stored_layout,
    stored_spec,
)
from tests.models.small_configs import CONFIGS

SIZES = {"stage": 1, "data": 1, "fsdp": 2, "expert": 4, "context": 1, "tensor": 1}


def test_axes_become_mesh_axes():
    assert spec_for(("embed", None, "heads"), STORED) == P(("fsdp", "expert"), None, "tensor")
    assert spec_for(("embed", None, "heads"), COMPUTE) == P(None, None, "tensor")
    assert spec_for(("experts", None, "ffn"), STORED) == P(("expert", "fsdp"), None, "tensor")
    assert spec_for(("batch", "seq", "embed"), COMPUTE) == P(BATCH_AXES, "context", None)


def test_both_tables_know_every_axis_of_a_weight():
    names = {axis for cfg in CONFIGS.values() for i in infos(cfg) for axis in i.axes if axis}
    assert names <= set(STORED) and names <= set(COMPUTE)
    used = {m for e in STORED.values() if e for m in ((e,) if isinstance(e, str) else e)}
    assert used <= set(MESH_AXES)


def infos(cfg):
    return flat_infos(model_parts(cfg).infos)


def test_wrong_axes_are_named():
    with pytest.raises(ValueError, match="colour"):
        spec_for(("embed", "colour"), STORED)
    with pytest.raises(ValueError, match="two dims"):
        spec_for(("embed", "experts"), STORED)


@pytest.mark.parametrize(
    ("spec", "shape", "want"),
    [
        (P(("fsdp", "expert")), (16,), P(("fsdp", "expert"))),
        (P(("fsdp", "expert")), (12,), P("fsdp")),  # 8 does not divide it, 2 does
        (P(("fsdp", "expert")), (7,), P(None)),
        (P("expert", "fsdp"), (8, 3), P("expert", None)),
        (P(None, "tensor"), (3, 5), P(None, "tensor")),  # an axis of 1 divides everything
        (P("fsdp"), (4, 6), P("fsdp", None)),
        (P(), (), P()),
    ],
)
def test_only_axes_that_divide_a_dim_stay(spec, shape, want):
    assert fit_spec(spec, shape, SIZES) == want


@pytest.mark.parametrize(
    ("experts", "want"),
    [
        (16, P(("expert", "fsdp"), None, "tensor")),  # whole experts on all 8 devices
        (12, P("expert", "fsdp", "tensor")),  # 3 a device of `expert`: the width takes fsdp
        (5, P(None, "fsdp", "tensor")),
    ],
)
def test_experts_spend_fsdp_before_their_width_does(experts, want):
    axes = ("experts", "expert_embed", "ffn")
    assert stored_layout(axes, (experts, 6, 8), SIZES) == want


def test_stacked_layers_are_whole():
    info = ParamInfo("w", ("embed", "ffn"), stack=2)
    assert stored_spec(info, (3, 2, 16, 8), SIZES) == P("stage", None, ("fsdp", "expert"), "tensor")
    assert stored_spec(ParamInfo("w", ("vocab", "embed")), (512, 64), SIZES) == P(
        "tensor", ("fsdp", "expert")
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_of_a_model_divides_evenly(name):
    parts = model_parts(CONFIGS[name])
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    shardings = shardings_for(parts.infos, parts.params, mesh)
    for info, leaf, sharding in zip(
        flat_infos(parts.infos),
        jax.tree.leaves(parts.params),
        jax.tree.leaves(shardings),
        strict=True,
    ):
        assert len(info.axes) + info.stack == len(leaf.shape), info.name
        local = sharding.shard_shape(leaf.shape)  # raises where it does not divide
        if info.num_dims >= 2 and "experts" in info.axes:
            assert math.prod(local) * 8 == math.prod(leaf.shape), info.name
        elif "embed" in info.axes:  # 32 wide, over all 8 devices
            place = info.stack + info.axes.index("embed")
            assert local[place] == leaf.shape[place] // 8, info.name


def test_a_device_holds_its_even_share_of_k3():
    """Over fsdp=8 x expert=64 no device stores 1 % more than a 512th of the 2.8 T parameters."""
    cfg = build_section(ModelConfig, kimi_k3.get_config().model.to_dict(), "model.")
    parts = model_parts(cfg)
    sizes = {**SIZES, "fsdp": 8, "expert": 64}
    total = local = 0
    for info, leaf in zip(flat_infos(parts.infos), jax.tree.leaves(parts.params), strict=True):
        spec = stored_spec(info, leaf.shape, sizes)
        axes = [m for e in spec if e for m in ((e,) if isinstance(e, str) else e)]
        total += math.prod(leaf.shape)
        local += math.prod(leaf.shape) // math.prod(sizes[axis] for axis in axes)
    assert total > 2.7e12
    assert local < 1.01 * total / 512


# ---- mesh


def test_mesh_has_all_axes_in_order():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    assert mesh.axis_names == MESH_AXES == ("stage", "data", "fsdp", "expert", "context", "tensor")
    assert dict(mesh.shape) == SIZES
    # Neighbours along `expert` are neighbours in the list of devices.
    ids = [device.id for device in mesh.devices[0, 0, 0, :, 0, 0]]
    assert ids == [device.id for device in jax.devices()[:4]]
    assert num_batch_shards(dict(mesh.shape)) == 8


def test_one_size_may_be_what_is_left():
    assert dict(make_mesh(MeshConfig(fsdp=-1, expert=2)).shape)["fsdp"] == 4
    assert dict(make_mesh(MeshConfig(data=-1, fsdp=1)).shape)["data"] == 8
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    assert set(one.shape.values()) == {1}


@pytest.mark.parametrize("sizes", [{"fsdp": 3}, {"fsdp": 4, "expert": 4}, {"fsdp": -1, "data": -1}])
def test_a_mesh_that_does_not_fit_is_refused(sizes):
    with pytest.raises(ConfigError) as error:
        make_mesh(MeshConfig(**sizes))
    assert "\n" not in str(error.value) and "mesh" in str(error.value)


def test_the_slow_part_of_an_axis_is_outermost():
    mesh = make_mesh(MeshConfig(fsdp=4, expert=2, dcn=DcnConfig(fsdp=2)))
    ids = np.vectorize(lambda device: device.id)(mesh.devices).reshape(4, 2)
    # Each half of the list of devices stands for a host: fsdp crosses them once, expert never.
    half = ids // 4
    assert (half[:2] == half[0, 0]).all() and (half[2:] == half[2, 0]).all()
    assert half[0, 0] != half[2, 0]
    assert sorted(ids.ravel()) == list(range(8))


# ---- inside a step


def test_nothing_happens_without_a_mesh():
    x = jnp.ones((4, 2))
    assert active_mesh() is None
    assert constrain(x, ("batch", "embed")) is x
    fn = lambda x: x + 1  # noqa: E731
    assert batch_local(fn, (0,))(x).shape == x.shape


def test_constrain_lays_a_value_out():
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, expert=4))):
        assert active_mesh() is not None
        x = jax.jit(lambda x: constrain(x, ("batch", "embed")))(jnp.ones((16, 3)))
        assert x.sharding.shard_shape(x.shape) == (2, 3)
        y = jax.jit(lambda x: constrain(x, ("batch", "embed")))(jnp.ones((3, 3)))
        assert y.sharding.shard_shape(y.shape) == (3, 3)  # 3 rows do not divide


def test_batch_local_runs_on_each_devices_rows():
    seen = []

    def rows(x, scale):
        seen.append(x.shape)
        assert active_mesh() is None  # inside, everything is local
        return x * scale, x.sum(1)

    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, expert=4))):
        x = jnp.arange(32.0).reshape(16, 2)
        out, sums = jax.jit(batch_local(rows, (0,)))(x, jnp.float32(3))
    assert (2, 2) in seen
    np.testing.assert_array_equal(out, 3 * x)
    np.testing.assert_array_equal(sums, x.sum(1))
