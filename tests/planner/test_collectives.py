"""Collectives read from HLO text: what, how often, over which mesh axes, how many bytes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.planner.collectives import Collective, count_collectives, replica_groups
from moejax.planner.hlo import parse_computations, type_bytes
from moejax.planner.roofline import with_links

MESH = {"data": 2, "fsdp": 2, "expert": 2}

# As XLA prints it for CUDA (async pairs, operands without types) and TPU (a fusion, typed
# operands), shortened; the loops run 12 times, 12 x 3 times, and as often as the data says.
HLO = """\
HloModule jit_step, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (p: (s32[], bf16[16,2])) -> (s32[], bf16[16,2]) {
  %p = (s32[], bf16[16,2]{1,0}) parameter(0)
  %x = bf16[16,2]{1,0} get-tuple-element(%p), index=1
  %swap = bf16[16,2]{1,0} all-to-all(bf16[16,2]{1,0} %x), channel_id=2, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], bf16[16,2]{1,0}) tuple(%i, %swap)
}

%fused (f: f32[8,4]) -> f32[4,4] {
  %f = f32[8,4]{1,0} parameter(0)
  ROOT %scattered = f32[4,4]{1,0} reduce-scatter(f32[8,4]{1,0} %f), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}, to_apply=%add
}

%body (p: (s32[], f32[8,4], bf16[16,2])) -> (s32[], f32[8,4], bf16[16,2]) {
  %p = (s32[], f32[8,4]{1,0}, bf16[16,2]{1,0}) parameter(0)
  %w = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %start = (f32[8,4]{1,0}, f32[32,4]{1,0}) all-gather-start(%w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %done = f32[32,4]{1,0} all-gather-done(%start)
  %rs = f32[4,4]{1,0} fusion(%w), kind=kCustom, calls=%fused
  %loop = (s32[], bf16[16,2]{1,0}) while(%arg), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %t = (s32[], f32[8,4]{1,0}, bf16[16,2]{1,0}) tuple(%i, %w, %x)
}

%further (p: (s32[], bf16[16,2])) -> (s32[], bf16[16,2]) {
  %p = (s32[], bf16[16,2]{1,0}) parameter(0)
  %x = bf16[16,2]{1,0} get-tuple-element(%p), index=1
  %o = s64[2]{0} constant({0, 8})
  %again = bf16[16,2]{1,0} ragged-all-to-all(%x, %x, %o, %o, %o, %o), replica_groups={{0,1},{2,3},{4,5},{6,7}}
  ROOT %t = (s32[], bf16[16,2]{1,0}) tuple(%i, %again)
}

ENTRY %main.7 (arg0: f32[8,4]) -> f32[8,4] {
  %arg0 = f32[8,4]{1,0} parameter(0), sharding={devices=[2,1]<=[2]}
  %layers = (s32[], f32[8,4]{1,0}, bf16[16,2]{1,0}) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"},"known_init_step":{"init":"0","step":"1"}}
  %more = (s32[], bf16[16,2]{1,0}) while(%init2), condition=%cond2, body=%further
  %mine = f32[8,4]{1,0} all-reduce(%arg0), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
  %moved = f32[8,4]{1,0} collective-permute(%arg0), source_target_pairs={{0,4},{4,0},{1,5}}
  ROOT %all = f32[8,4]{1,0} all-reduce(%arg0), replica_groups={}, to_apply=%add
}
"""  # noqa: E501


def test_loops_fusions_and_async_pairs_are_counted_once_a_run():
    assert count_collectives(HLO, MESH) == [
        Collective("all-gather", "fsdp*expert", 4, 12, 12 * 128, 12 * 128 * 3),
        Collective("all-to-all", "expert", 2, 36, 36 * 64, 36 * 32),
        Collective("reduce-scatter", "fsdp", 2, 12, 12 * 128, 12 * 64),
        Collective("all-reduce", "data*fsdp*expert", 8, 1, 128, 224),
        Collective("collective-permute", "data", 2, 1, 128, 128),
        Collective("ragged-all-to-all", "expert", 2, 1, 64, 32, open_loop=True),
    ]


# As the TPU compiler prints loops: without their length, which the counter tells.
TPU_LOOP = """\
%body (p: (s32[], f32[8,4], s32[])) -> (s32[], f32[8,4], s32[]) {
  %p = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %x = f32[8,4]{1,0:T(8,128)} get-tuple-element(%p), index=1
  ROOT %sum = f32[8,4]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}
}

%cond (p: (s32[], f32[8,4], s32[])) -> pred[] {
  %p = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) parameter(0)
  %n = s32[]{:T(128)} constant(9)
  %last = s32[]{:T(128)} get-tuple-element(%p), index=2
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %END), direction=LT
}

ENTRY %main (x: f32[8,4], m: s32[]) -> f32[8,4] {
  %x = f32[8,4]{1,0:T(8,128)} parameter(0)
  %m = s32[]{:T(128)} parameter(1)
  %two = s32[]{:T(128)} constant(2)
  %start = s32[]{:T(128)} copy(%two), backend_config={"flag_configs":[]}
  %args = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) tuple(%START, %x, %m)
  ROOT %loop = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}, s32[]{:T(128)}) while(%args), condition=%cond, body=%body
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("start", "end", "count", "is_open"),
    [("start", "n", 7, False), ("start", "last", 1, True), ("m", "n", 1, True)],
)
def test_a_loop_without_its_length_is_counted_from_its_counter(start, end, count, is_open):
    hlo = TPU_LOOP.replace("%START", f"%{start}").replace("%END", f"%{end}")
    found = [(row.count, row.operand_bytes, row.open_loop) for row in count_collectives(hlo, MESH)]
    assert found == [(count, count * 128, is_open)]


def test_the_entry_is_found_and_every_instruction_read():
    computations, entry = parse_computations(HLO)
    assert entry == "main.7"
    assert {name: len(body) for name, body in computations.items()} == {
        "add": 3, "inner": 5, "fused": 2, "body": 7, "further": 5, "main.7": 6,
    }  # fmt: skip
    start = computations["body"]["start"]
    assert start.opcode == "all-gather-start" and start.operands == ("w",)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}, to_apply=%add", [[0, 2], [1, 3]]),
        ("channel_id=1, replica_groups=[2,2]<=[4], use_global_device_ids=true", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups={}, to_apply=%add", []),
        ("replica_groups=mesh['axis_0'=1,'axis_1'=4] {'axis_1'}, x=1", [[0, 1, 2, 3]]),
        (
            "replica_groups=mesh['axis_0'=1,'axis_2'=4,'axis_3'=2], device_ids=([2,4]T(1,0)) "
            "{'axis_3'}, use_global_device_ids=true",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_every_way_to_write_replica_groups(text, groups):
    assert replica_groups(text) == groups


def test_groups_in_a_form_that_is_not_known_are_not_guessed():
    with pytest.raises(ValueError, match="unknown form: , replica_groups=v9"):
        replica_groups(", replica_groups=v9[2], to_apply=%add")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4), ("bf16[3,5]{1,0}", 30), ("pred[7]", 7), ("s4[6]{0}", 3), ("f8e4m3fn[9]", 9),
        ("(f32[2]{0}, (u32[], s64[3]{0:T(256)}))", 8 + 4 + 24), ("f32[<=10,2]", 80),
    ],
)  # fmt: skip
def test_bytes_of_a_type(text, size):
    assert type_bytes(text) == size


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    devices = np.asarray(jax.devices()).reshape(tuple(MESH.values()))
    return Mesh(devices, tuple(MESH), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("axes", [("expert",), ("fsdp",), ("data", "expert"), tuple(MESH)])
def test_a_compiled_loop_of_collectives_is_counted_as_written(mesh, axes):
    """Real HLO of this jax: five psums and five all-to-alls in a scan, over any axes."""
    ways = int(np.prod([MESH[axis] for axis in axes]))

    def body(x, _):
        total = jax.lax.psum(x, axes)
        return jax.lax.all_to_all(x + total, axes, 0, 0, tiled=True), None

    step = jax.shard_map(
        lambda x: jax.lax.scan(body, x, length=5)[0], mesh=mesh, in_specs=P(), out_specs=P(),
        check_vma=False,
    )  # fmt: skip
    x = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=NamedSharding(mesh, P()))
    found = count_collectives(jax.jit(step).lower(x).compile().as_text(), MESH)
    size = 5 * 16 * 3 * 4
    assert {(row.kind, row.axes, row.group, row.count, row.operand_bytes) for row in found} == {
        ("all-reduce", "*".join(axes), ways, 5, size),
        ("all-to-all", "*".join(axes), ways, 5, size),
    }
    assert not any(row.open_loop for row in found)


# Two TPU slices, shortened: what crosses them is a `send` to their own runtime.
SLICES = """\
HloModule jit_step

ENTRY %main (p: f32[8,128], i: s32[2]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %i = s32[2]{0:T(128)} parameter(1)
  %token = token[] after-all()
  %rs = f32[4,128]{1,0} reduce-scatter(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%add
  %send = (f32[4,128]{1,0:T(8,128)}, u32[], token[]) send(%rs, %token), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %rows = (f32[8,128]{1,0}, u32[], token[]) send(%p, %token), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_megascale_ragged_operand_index="0",_xla_megascale_target={{100000,200000},{100001,200001},{100002,200002},{100003,200003}},_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"}
  %sizes = (s32[2]{0}, u32[], token[]) send(%i, %token), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_megascale_ragged_operand_index="2",_xla_megascale_target={{100000,200000},{100001,200001},{100002,200002},{100003,200003}},_xla_megascale_transfer_type="RAGGED_ALL_TO_ALL"}
  %callback = (s32[2]{0}, u32[], token[]) send(%i, %token), channel_id=6, is_host_transfer=true
  %sent = token[] send-done(%send), channel_id=3
  ROOT %ag = f32[8,128]{1,0} all-gather(%rs), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""  # noqa: E501


@pytest.mark.parametrize("across", ["data", "expert"])
def test_what_crosses_slices_is_told_apart(across):
    """Groups inside a slice are numbered by the slice alone, those between by device."""
    ids = np.array([[100000, 100001, 100002, 100003], [200000, 200001, 200002, 200003]])
    inside = ["fsdp", "expert"] if across == "data" else ["data", "fsdp"]
    ids = ids.ravel() if across == "data" else ids.T.ravel()
    rows = count_collectives(SLICES, MESH, ids.tolist())
    near = dict.fromkeys(MESH, 2) | {across: 1}
    got = {(r.kind, r.axes, r.group, r.between_slices): with_links(r, near) for r in rows}
    every = "*".join(inside)
    assert got.keys() == {
        ("reduce-scatter", inside[1], 2, False), ("all-gather", every, 4, False),
        ("all-reduce", across, 2, True), ("ragged-all-to-all", across, 2, True),
    }  # fmt: skip
    sums, sends = got["all-reduce", across, 2, True], got["ragged-all-to-all", across, 2, True]
    assert (sums.link_bytes, sums.network_bytes) == (0, 4 * 128 * 4)
    assert (sends.count, sends.network_bytes) == (1, 8 * 128 * 4 // 2)
    assert got["reduce-scatter", inside[1], 2, False].network_bytes == 0
