"""What a case of the Swap Core's bench says of its figures; the figures need compilers (aot)."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from moejax.planner import bench_swap as bench

GIB = 2**30
FOUND = bench.Found(
    "toy", none=30 * GIB, full=10 * GIB, budget=20 * GIB, predicted=19 * GIB, compiled=18 * GIB,
    host=GIB, kept=("kda_qkv",), offloaded=("attended",), saved=0.5, seconds=1.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True), ({"predicted": 20 * GIB}, False), ({"predicted": 16 * GIB}, False),
        ({"compiled": 21 * GIB, "predicted": 20 * GIB}, False), ({"none": 20 * GIB}, False),
    ],
)  # fmt: skip
def test_a_case_holds_where_it_is_near_and_within_the_budget(changes, holds):
    assert dataclasses.replace(FOUND, **changes).holds == holds


def test_the_table_has_a_line_a_case():
    last = bench.table([FOUND]).splitlines()[-1]
    assert "| toy | 30.00 | 10.00 | 20.00 | 19.00 | 18.00 | +5.6 % | 1.00 |" in last
    assert "kda_qkv; attended | 50 % | yes |" in last


def test_an_unknown_case_is_one_line_and_2(capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--cases=linear"])
    assert ended.value.code == 2
    assert "--cases has linear; known: linear-8xh200" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("case", ["linear-8xh200", "linear-8xv5p"])
def test_predicted_peaks_are_the_compiled_ones(case):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    assert bench.measure(case).holds
