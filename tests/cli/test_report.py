"""`moejax report`: what it prints, where it writes, how it refuses."""

import json

import pytest

from tests.observability.test_report import write_run


def test_it_prints_the_facts_and_writes_the_page(moejax, tmp_path):
    run = write_run(tmp_path / "run")
    done = moejax("report", f"--workdir={run}", "--window=20")
    assert done.code == 0 and not done.err
    assert "layer 4: no token for 3" in done.out and "3 layers x 6" in done.out
    assert f"{run / 'report.html'}, and 4 pictures in {run / 'report'}" in done.out
    assert (run / "report.html").stat().st_size > 50_000
    as_json = moejax("report", f"--workdir={run}", f"--out={tmp_path / 'out'}", "--json")
    found = json.loads(as_json.out)
    assert found["page"] == str(tmp_path / "out" / "report.html")
    assert found["dead"] == [{"layer": 1, "expert": 0, "last_step": None}]
    assert found["window"] == [1, 60]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--workdir is needed"),
        (("--workdir=no/such/run",), "no/such/run is not a folder"),
        (("--workdir=.", "--window=0"), "'0' is not a whole number of at least 1"),
        (("--workdir=.", "--config.seed=1"), "a report has no --config.FIELD"),
        (("--workdr=.",), "nearest: --workdir"),
    ],
)
def test_refusals(moejax, argv, says):
    outcome = moejax("report", *argv)
    assert outcome.code == 2 and not outcome.out
    (line,) = outcome.err.splitlines()
    assert line.startswith("error: ") and says in line


def test_a_damaged_line_is_named(moejax, tmp_path):
    run = write_run(tmp_path / "run", steps=20)
    lines = (run / "expert_loads.jsonl").read_text().splitlines()
    whole = json.loads(lines[1])
    damaged = "AAAA" + whole["counts"][4:]  # no header of zlib
    cases = ((lines[1][:-30], "no whole JSON"), (json.dumps(whole | {"counts": damaged}), "unpack"))
    for line, says in cases:
        (run / "expert_loads.jsonl").write_text("\n".join([lines[0], line, *lines[2:]]) + "\n")
        outcome = moejax("report", f"--workdir={run}")
        assert outcome.code == 2 and "expert_loads.jsonl, line 2, is damaged: it" in outcome.err
        assert says in outcome.err and "Take the line out" in outcome.err
        assert len(outcome.err.splitlines()) == 1 and not list(run.glob("*report*"))
