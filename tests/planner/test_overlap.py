"""What a schedule hides: played from HLO text, with costs that are known by hand."""

from __future__ import annotations

import dataclasses

import pytest

from moejax.planner.collectives import collective_reader
from moejax.planner.cost import cost, product_flops
from moejax.planner.hardware import CHIPS
from moejax.planner.hlo import parse_computations
from moejax.planner.overlap import hidden_share, read_overlap

MESH, NEAR = {"fsdp": 4}, {"fsdp": 4}
# One byte takes 1 ns on the wire, one FLOP 1 ns of compute, memory is free.
CHIP = dataclasses.replace(CHIPS["h200"], link_bytes_s=1e9, hbm_bytes_s=1e30)
PEAK = 1e9
GATHER = 3 * 4 * 100  # bytes that a device sends of f32[100] to three others, and ns
DOT = 2 * 10 * 4 * 10  # FLOPs of [10, 4] x [4, 10], and ns

# As XLA prints a scheduled module for CUDA, shortened. The loop runs five times.
HLO = """\
HloModule jit_step, is_scheduled=true

%fused_dot (a: f32[10,4], b: f32[4,10]) -> f32[10,10] {
  %a = f32[10,4]{1,0} parameter(0)
  %b = f32[4,10]{1,0} parameter(1)
  ROOT %product = f32[10,10]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], f32[100], f32[10,4], f32[4,10])) -> (s32[], f32[100], f32[10,4], f32[4,10]) {
  %p = (s32[], f32[100]{0}, f32[10,4]{1,0}, f32[4,10]{1,0}) parameter(0)
  %w = f32[100]{0} get-tuple-element(%p), index=1
  %x = f32[10,4]{1,0} get-tuple-element(%p), index=2
  %y = f32[4,10]{1,0} get-tuple-element(%p), index=3
  %half = (f32[100]{0}, f32[400]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}, backend_config={"is_sync":false}
  %beside = f32[10,10]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused_dot
  %half_done = f32[400]{0} all-gather-done(%half)
  %after = f32[10,10]{1,0} fusion(%x, %y), kind=kCustom, calls=%fused_dot
  %blocked = (f32[400]{0}, f32[100]{0}) reduce-scatter-start(%half_done), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add, backend_config={"is_sync":true}
  %blocked_done = f32[100]{0} reduce-scatter-done(%blocked)
  ROOT %next = (s32[], f32[100]{0}, f32[10,4]{1,0}, f32[4,10]{1,0}) tuple(%i, %blocked_done, %x, %y)
}

ENTRY %main (p: (s32[], f32[100], f32[10,4], f32[4,10])) -> f32[100] {
  %p = (s32[], f32[100]{0}, f32[10,4]{1,0}, f32[4,10]{1,0}) parameter(0)
  %w = f32[100]{0} get-tuple-element(%p), index=1
  %long = (f32[100]{0}, f32[400]{0}) all-gather-start(%w), replica_groups={{0,1,2,3}}, dimensions={0}
  %loop = (s32[], f32[100]{0}, f32[10,4]{1,0}, f32[4,10]{1,0}) while(%p), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %long_done = f32[400]{0} all-gather-done(%long)
  ROOT %out = f32[100]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_a_transfer_is_hidden_as_far_as_its_end_finds_it_done():
    rows = read_overlap(HLO, collective_reader(MESH), NEAR, CHIP, PEAK)
    got = {(row.kind, row.in_loop): row for row in rows}
    assert got.keys() == {("all-gather", True), ("reduce-scatter", True), ("all-gather", False)}
    half = got["all-gather", True]
    assert (half.count, half.sent_bytes, half.async_bytes) == (5, 5 * GATHER, 5 * GATHER)
    assert half.seconds == pytest.approx(5e-9 * GATHER)
    assert half.exposed_s == pytest.approx(5e-9 * (GATHER - DOT))
    assert half.hidden_bytes == pytest.approx(5 * DOT, abs=5)
    assert half.flops == 5 * DOT
    # Start and end stand together: nothing goes beside it.
    blocked = got["reduce-scatter", True]
    assert blocked.hidden_bytes == blocked.async_bytes == 0 == blocked.flops
    assert blocked.exposed_s == blocked.seconds > 0
    # Over the whole loop.
    long = got["all-gather", False]
    assert (long.count, long.exposed_s, long.hidden_bytes) == (1, 0.0, GATHER)
    assert long.flops == 5 * 2 * DOT
    sent = 5 * (GATHER + 300 * 4) + GATHER
    assert hidden_share(rows) == pytest.approx((5 * DOT + GATHER) / sent)
    assert [row.exposed_s for row in rows] == sorted((r.exposed_s for r in rows), reverse=True)


def test_nothing_sent_is_nothing_exposed():
    assert read_overlap(HLO, lambda found, body: None, NEAR, CHIP, PEAK) == []
    assert hidden_share([]) == 1.0


COSTS = """\
%sliced (w: f32[9,8,8], i: s32[]) -> f32[8,8] {
  %w = f32[9,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %one = f32[1,8,8]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,8,8}
}

%written (all: f32[9,8,8], new: f32[1,8,8], i: s32[]) -> f32[9,8,8] {
  %all = f32[9,8,8]{2,1,0} parameter(0)
  %new = f32[1,8,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %put = f32[9,8,8]{2,1,0} dynamic-update-slice(%all, %new, %i, %i, %i)
}

ENTRY %main (w: f32[9,8,8], x: bf16[3,5,7], y: bf16[3,7,2]) -> f32[9,8,8] {
  %w = f32[9,8,8]{2,1,0} parameter(0)
  %x = bf16[3,5,7]{2,1,0} parameter(1)
  %y = bf16[3,7,2]{2,1,0} parameter(2)
  %i = s32[] constant(1)
  %batched = bf16[3,5,2]{2,1,0} dot(%x, %y), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  %conv = bf16[3,5,2]{2,1,0} convolution(%x, %y), window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf
  %gemm = (bf16[15,2]{1,0}, s8[64]{0}) custom-call(%x2, %y2), custom_call_target="__cublas$gemm"
  %x2 = bf16[15,7]{1,0} bitcast(%x)
  %y2 = bf16[7,2]{1,0} bitcast(%y)
  %one = f32[1,8,8]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
  %put = f32[9,8,8]{2,1,0} fusion(%w, %one, %i), kind=kLoop, calls=%written
  %added = f32[1,8,8]{2,1,0} add(%one, %one)
}
"""  # noqa: E501


def test_flops_of_every_form_of_a_product():
    body = parse_computations(COSTS)[0]["main"]
    flops = {name: product_flops(body[name], body) for name in ("batched", "conv", "gemm", "added")}
    assert flops == {
        "batched": 2 * 3 * 5 * 2 * 7, "conv": 2 * 3 * 5 * 2 * 7,
        "gemm": pytest.approx(2 * 15 * 2 * 7), "added": 0,
    }  # fmt: skip


def test_bytes_are_those_that_move():
    """A slice of a stack of layers, or a write into it, does not move the stack."""
    computations, _ = parse_computations(COSTS)
    body = computations["main"]
    moved = {name: cost(body[name], body, computations).bytes for name in ("one", "put", "added")}
    layer = 8 * 8 * 4
    assert moved == {"one": 2 * layer + 4, "put": 2 * layer + 4, "added": 3 * layer}
