"""The cost of gathered keys on absent TPUs: how schedules are read, and the table that is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moejax.planner.gather_cost import fusion_cycles, main, tile_cycles
from pallas_kernels.sparse_flash_attention.break_even import SLOWDOWN

HLO = """
%body (p: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  ROOT %f.1 = s32[] fusion(%p), kind=kLoop, calls=%g, backend_config={"estimated_cycles":"70"}
}

%cond (p: s32[]) -> pred[] {
  ROOT %c = pred[] parameter(0)
}

ENTRY %main (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %f.2 = s32[] fusion(%a), kind=kLoop, calls=%h, backend_config={"estimated_cycles":"5"}
  ROOT %w = s32[] while(%f.2), condition=%cond, body=%body, backend_config={LENGTH}
}
"""


def test_a_loop_counts_at_every_trip():
    assert fusion_cycles(HLO.replace("LENGTH", '"known_trip_count":{"n":"3"}')) == 5 + 3 * 70
    with pytest.raises(ValueError, match="loop w has no fixed length"):
        fusion_cycles(HLO)


def test_a_tile_is_the_largest_region_with_no_other_in_it():
    regions = {7: (0, 900), 8: (10, 400), 9: (20, 50), 11: (500, 800)}  # 9 is too small to count
    lines = [f"0x{at:x} : > {{ work }}" for at in range(1000)]
    for name, (begin, end) in regions.items():
        lines[begin] += f" /* Start region {name} */"
        lines[end] += f" /* End region {name} */"
    lines[100] += " /* Start/End empty region 77 */"
    assert tile_cycles("\n".join(lines)) == 391


def test_a_chip_without_schedules_is_refused(capsys):
    assert main(["--chip=h200"]) == 2
    assert capsys.readouterr().err == "error: --chip=h200 is unknown. Chips: v5p, v6e.\n"


@pytest.mark.aot
@pytest.mark.parametrize(("chip", "line"), [("v5p", "tpu"), ("v6e", "v6e")])
def test_the_table_is_what_the_compiler_says(chip, line):
    done = subprocess.run(
        [sys.executable, "-m", "moejax.planner.gather_cost", f"--chip={chip}"],
        cwd=Path(__file__).parents[2], env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert float(done.stdout.split()[-1]) == pytest.approx(SLOWDOWN[line], rel=0.1)
