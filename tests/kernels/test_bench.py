"""The device bench: real cases are well formed, a dry run ends in a table, faults are told."""

import io
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import bench
from pallas_kernels.benching import foreign, timing, torch_side
from pallas_kernels.benching.ceilings import Ceilings
from pallas_kernels.benching.device_case import (
    DeviceCase,
    both_directions,
    relative_errors,
)
from pallas_kernels.benching.timing import Budget, once
from pallas_kernels.lowering import lowered

REAL = bench.cases(bench.OPS, toy=False)
KEY = jax.random.key(0)


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_real_cases_lower_for_a_gpu_and_all_that_is_compared_gives_the_same_shapes(case):
    args = jax.eval_shape(case.make, KEY)
    cotangents = jax.eval_shape(case.cotangents, KEY, args)
    run = both_directions(case.implementation("pallas_gpu"), case.argnums)
    assert "triton" in lowered(run, (args, cotangents), "gpu")
    wanted = jax.eval_shape(run, args, cotangents)
    for name in ("chunked", *case.others):
        fn = both_directions(case.function(name), case.argnums)
        try:
            found = jax.eval_shape(fn, args, cotangents)
        except ImportError:
            continue
        assert [x.shape for x in jax.tree.leaves(found)] == [
            x.shape for x in jax.tree.leaves(wanted)
        ], name
    flops, moved = case.flops, case.traffic(args)
    assert moved[0] > 0 and moved[1] >= moved[0] and flops[1] >= flops[0]


def test_floors_are_those_of_the_guide():
    """Milliseconds at 4.3 TB/s and 790 TFLOP/s, worked out by hand from the sizes."""
    best = Ceilings(4.3e12, 790e12)
    floors = {}
    for case in REAL:
        parts = zip(case.flops, case.traffic(jax.eval_shape(case.make, KEY)), strict=True)
        floors[case.name] = [1e3 * best.floor_s(f, b) for f, b in parts]
    find = lambda start: next(v for k, v in floors.items() if k.startswith(start))  # noqa: E731
    assert find("grouped_matmul K3 down")[0] == pytest.approx(1.83, abs=0.01)
    assert find("grouped_matmul K3 gate")[0] == pytest.approx(3.65, abs=0.01)
    assert find("kda K3")[0] == pytest.approx(0.24, abs=0.01)
    assert find("kda Kimi Linear")[0] == pytest.approx(0.31, abs=0.01)
    assert find("permute K3")[0] == pytest.approx(0.23, abs=0.01)
    assert sum(find("linear_xent K3")) == pytest.approx(36.5, abs=0.1)


def sums(x, *, impl):
    """Twice the sum; in one implementation wrong, in another refused."""
    if impl == "refused":
        raise NotImplementedError("not for this shape")
    factor = 2.5 if impl == "wrong" else 2.0
    return factor * jnp.sum(x, axis=0)


def absent(x):
    raise ImportError("No module named 'other'")


SUMS = DeviceCase(
    "sums", "n8", lambda key: (jax.random.normal(key, (8, 4), jnp.bfloat16),), sums, argnums=(0,),
    flops=(32, 32), tolerance=1e-2, others={"numpy": lambda x: 2 * x.sum(0), "other": absent},
)  # fmt: skip


def a_bench(ours="chunked", seconds=1e6):
    lines = io.StringIO()
    made = bench.Bench(Budget(seconds), once, Ceilings(1e12, 1e12), [lines], ours, 1, programs={})
    return made, lines


@pytest.mark.parametrize(
    ("ours", "status"), [("chunked", "ok"), ("wrong", "wrong"), ("refused", "refused")]
)
def test_a_check_tells_right_from_wrong_and_refused(ours, status):
    made, lines = a_bench(ours)
    facts = bench.check(made, SUMS)
    assert facts["status"] == status
    assert json.loads(lines.getvalue()) == facts
    if status == "wrong":
        assert facts["errors"] == pytest.approx([0.25, 0.25], abs=0.01)


def test_timings_name_what_is_absent_and_stop_at_the_budget():
    made, lines = a_bench()
    told = list(bench.timings(made, SUMS))
    assert [json.loads(line) for line in lines.getvalue().splitlines()] == told
    status = {(line["what"], line["impl"]): line["status"] for line in told}
    assert status["forward", "numpy"] == "ok" and status["forward + backward", "numpy"] == "ok"
    assert status["forward", "other"] == "absent"
    first = told[0]
    # 64 bytes in bfloat16 and 8 out, at 1e12 a second
    assert first["floor_ms"] == pytest.approx(72e-9)
    assert first["share_of_floor"] == pytest.approx(first["floor_ms"] / first["ms"])

    made, _ = a_bench(seconds=0.0)
    assert {line["status"] for line in bench.timings(made, SUMS)} == {"out of time"}
    assert bench.check(made, SUMS)["status"] == "out of time"


def test_errors_are_relative():
    actual, expected = [jnp.array([1.0, 2.0])], [jnp.array([1.0, 1.0])]
    assert float(relative_errors(actual, expected)[0]) == pytest.approx(0.5**0.5)


def test_the_clock_leaves_out_what_a_wait_costs(monkeypatch):
    """A program that takes 2 ms a call, and 20 ms more for a wait, takes 2 ms."""
    now = 0.0

    class Answer:
        def block_until_ready(self):
            nonlocal now
            now += 0.02
            return self

    def program(x):
        nonlocal now
        now += 0.002
        given.append(x)
        return Answer()

    given = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    assert timing.device_seconds(program, [(0,), (1,), (2,)]) == pytest.approx(0.002)
    assert given[:3] == [0, 1, 2]  # arguments take turns


def test_torch_is_absent_in_words(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    monkeypatch.setitem(__import__("sys").modules, "triton.testing", None)
    torch_side.main(["fla,liger", json.dumps({"B": 1})])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["impl"], line["status"]) for line in lines] == [
        ("fla", "absent"), ("liger", "absent"),
    ]  # fmt: skip
    monkeypatch.setattr(foreign.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="torch"):
        foreign.torch_results(["fla"], {}, 1.0)
    assert set(foreign.installed().values()) == {False}


def test_bad_input_and_help(capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(["--ops=kdb"])
    assert stop.value.code == 2 and "Known: kda" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    assert "--budget-s" in capsys.readouterr().out


def check_dry_run(ops, capsys, tmp_path):
    out = tmp_path / "lines.jsonl"
    assert bench.main([f"--ops={','.join(ops)}", f"--out={out}", "--budget-s=1e6"]) == 0
    printed = capsys.readouterr().out
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [json.loads(line) for line in printed.splitlines() if line.startswith("{")] == lines
    machine, *rest = lines
    assert machine["dry_run"] and machine["jax"] == jax.__version__
    checks = [line for line in rest if line["kind"] == "check"]
    assert {line["op"] for line in checks} == set(ops)
    assert all(line["status"] == "ok" and line["impl"] == "pallas_gpu" for line in checks)
    ours = [line for line in rest if line["kind"] == "time" and line["impl"] == "pallas_gpu"]
    assert all(line["status"] == "ok" and line["ms"] > 0 for line in ours)
    assert "the times mean nothing" in printed
    assert all(f"### {line['op']} {line['size']}" in printed for line in checks)


def test_a_dry_run_of_one_operator(capsys, tmp_path):
    check_dry_run(["gated_norm"], capsys, tmp_path)


@pytest.mark.slow
def test_a_dry_run_of_all(capsys, tmp_path):
    check_dry_run({case.op for case in REAL}, capsys, tmp_path)
