"""Counting what a program launches, from its text."""

import pytest

from moejax.planner.launches import count_launches, main

LOOP = """HloModule jit_f, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %neg = f32[8]{0} negate(f32[8]{0} %p)
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element((s32[], f32[8]{0}) %carry), index=0
  %x = f32[8]{0} get-tuple-element((s32[], f32[8]{0}) %carry), index=1
  %y = f32[8]{0} fusion(f32[8]{0} %x), kind=kLoop, calls=%fused
  %z = f32[8]{0} custom-call(f32[8]{0} %y), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %out = (s32[], f32[8]{0}) tuple(s32[] %i, f32[8]{0} %z)
}

%condition (carry: (s32[], f32[8])) -> pred[] {
  %carry = (s32[], f32[8]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(s32[] %zero, f32[8]{0} %x)
  %loop = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %start), condition=%condition, body=%bodyTRIPS
  %y = f32[8]{0} get-tuple-element((s32[], f32[8]{0}) %loop), index=1
  ROOT %copy = f32[8]{0} copy(f32[8]{0} %y)
}
"""


def test_a_loop_counts_as_often_as_it_runs():
    known = LOOP.replace("TRIPS", ', backend_config={"known_trip_count":{"n":"5"}}')
    found = count_launches(known)
    assert (found.kernels, found.ours, found.open_loops) == (2 * 5 + 1, 5, 0)
    assert found.bytes == (2 * 5 + 1) * 2 * 8 * 4  # each reads and writes eight numbers


def test_a_loop_of_unknown_length_counts_once_and_is_told():
    found = count_launches(LOOP.replace("TRIPS", ""))
    assert (found.kernels, found.ours, found.open_loops) == (3, 1, 1)


@pytest.mark.parametrize("argv", [["--config=no_such"], ["--impls=fast", "--hardware=cpu:1"]])
def test_what_cannot_be_compiled_is_one_line(argv, capsys):
    assert main(argv) == 2
    assert capsys.readouterr().err.count("\n") == 1
