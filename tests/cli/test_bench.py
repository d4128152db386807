"""`moejax bench kernels`: the table, its floors, and what it refuses."""

import json
import sys

import jax.numpy as jnp
import pytest

import pallas_kernels.gated_norm.bench as gated_norm_bench
from pallas_kernels.benching.comparison import Comparison, both_ways


def _small(faster=None, smaller=None):
    """A sum beside one that holds a square of its argument."""
    return both_ways(
        "gated_norm", "n64", "an outer product", lambda x: x.sum() * x,
        lambda x: jnp.sin(jnp.outer(x, x)) @ x, lambda: (jnp.ones(64),), argnums=(0,),
        forward=(faster, smaller),
    )  # fmt: skip


def test_the_table_and_its_floors(moejax, monkeypatch):
    rows = _small(faster=1e-9, smaller=2)
    monkeypatch.setattr(gated_norm_bench, "comparisons", lambda: rows)
    shown = moejax("bench", "kernels", "--device=cpu", "--ops=gated_norm", "--rounds=1")
    assert shown.code == 0
    head, how, names, forward, backward = shown.out.splitlines()
    assert head.startswith("jax ") and "cores" in head
    assert how == "float32; best of 1 rounds in turn; MB of temporaries"
    assert names.split()[:3] == ["op", "size", "against"]
    assert forward.split()[0] == "gated_norm" and forward.endswith("held")
    assert backward.startswith("gated_norm f+b") and "held" not in backward


def test_a_broken_floor_of_memory_is_told_by_the_exit_code_and_one_of_time_is_not(
    moejax, monkeypatch
):
    monkeypatch.setattr(gated_norm_bench, "comparisons", lambda: _small(faster=1e9, smaller=1e9))
    shown = moejax("bench", "kernels", "--ops=gated_norm", "--rounds=1", "--json")
    report = json.loads(shown.out)
    forward, backward = report["rows"]
    assert shown.code == 1 and report["rounds"] == 1 and report["machine"]["platform"] == "cpu"
    assert not forward["time_held"] and not forward["memory_held"]
    assert forward["old_bytes"] / max(forward["new_bytes"], 1) == forward["memory_ratio"]
    assert backward["memory_held"] and backward["smaller"] is None

    monkeypatch.setattr(gated_norm_bench, "comparisons", lambda: _small(faster=1e9))
    shown = moejax("bench", "kernels", "--ops=gated_norm", "--rounds=1")
    assert shown.code == 0 and "not held: time" in shown.out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "moejax bench kernels"),
        (["layers"], "moejax bench kernels"),
        (["kernels", "--ops=kdb"], "Did you mean kda?"),
        (["kernels", "--ops="], "no operator ''"),
        (["kernels", "--rounds=0"], "at least 1"),
        (["kernels", "--device=npu"], "invalid choice"),
        (["kernels", "--devise=cpu"], "nearest: --device"),
        (["kernels", "--config.train.num_steps=1"], "no --config.FIELD"),
    ],
)
def test_bad_input_is_one_line(moejax, argv, message):
    shown = moejax("bench", *argv)
    assert shown.code == 2 and message in shown.err and shown.err.count("\n") == 1


def test_help_lists_the_operators(moejax):
    shown = moejax("bench", "--help")
    assert shown.code == 0
    for word in ("kda", "gated_norm", "--rounds", "--json", "exit code", "examples:"):
        assert word in shown.out


def test_every_operator_compares():
    """Each bench gives rows both ways, of functions, with floors where the README states them."""
    from moejax.cli.bench import OPS, _comparisons

    rows = _comparisons(OPS)
    assert all(isinstance(row, Comparison) and callable(row.make) for row in rows)
    assert {row.op for row in rows} == set(OPS)
    floors = {(r.op, r.what): (r.faster, r.smaller) for r in reversed(rows)}
    assert floors["kda", "forward + backward"] == (5, 15)
    assert floors["grouped_matmul", "forward + backward"] == (10, 6)
    assert floors["linear_xent", "forward + backward"] == (1, 6)
    assert "pallas_kernels.kda.bench" in sys.modules
