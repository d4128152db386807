"""Tiles: a table goes before reason, for its device and sizes only; the tuner finds and writes."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tune, tuning
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.timing import Budget
from pallas_kernels.choose import lowering_for
from pallas_kernels.gated_norm import tiles as gated_norm_tiles
from pallas_kernels.tuning import Question, tunable

DEVICE = jax.devices()[0].device_kind


class Inner(NamedTuple):
    keys: int
    warps: int = 4


class Tiles(NamedTuple):
    rows: int
    inner: Inner = Inner(8)


class Sizes(NamedTuple):
    width: int
    dtype: object


@tunable
def tiles_for(sizes: Sizes, chip: str = "h200") -> Tiles:
    return Tiles(sizes.width)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """The table of `tiles_for`, in a folder of this test."""
    path = tmp_path / "tuned.json"
    before = tuning.read
    monkeypatch.setattr(tuning, "read", lambda _: before.__wrapped__(path))
    monkeypatch.setattr(tuning.read, "cache_clear", lambda: None, raising=False)
    return path


QUESTION = Question("tiles_for", "sizes=width=64, dtype=bfloat16")
SIZES = Sizes(64, jnp.bfloat16)


def test_reason_decides_until_a_table_does(table):
    reasoned, timed = Tiles(64), Tiles(32, Inner(16, 2))
    assert tiles_for(SIZES) == reasoned
    tuning.write(table, DEVICE, QUESTION, timed, {"ms": 1.0})
    assert tiles_for(SIZES) == tiles_for(SIZES, "v5p") == timed
    assert tiles_for(Sizes(64, jnp.dtype("bfloat16"))) == timed
    assert tiles_for(Sizes(64, jnp.float32)) == reasoned
    with lowering_for("gpu"):  # of which there is none here
        assert tiles_for(SIZES) == reasoned
    entry = json.loads(table.read_text())[DEVICE]["tiles_for"][QUESTION.sizes]
    assert entry == {"tiles": {"rows": 32, "inner.keys": 16, "inner.warps": 2}, "ms": 1.0}


def test_a_table_of_another_device_or_of_other_fields_is_not_meant(table):
    tuning.write(table, "NVIDIA H200", QUESTION, Tiles(32), {})
    assert tiles_for(SIZES) == Tiles(64)
    tuning.write(table, DEVICE, QUESTION, Inner(2), {})
    assert tiles_for(SIZES) == Tiles(64)
    assert set(json.loads(table.read_text())) == {"NVIDIA H200", DEVICE}


def test_questions_are_collected_and_answers_forced():
    with tuning.asking() as asked, tuning.forcing({QUESTION: Tiles(7)}):
        assert tiles_for(SIZES) == Tiles(7)
    assert asked == {QUESTION: Tiles(64)}
    assert tiles_for(SIZES) == Tiles(64)


def test_neighbours_differ_in_one_number_and_stay_near():
    near = set(tune.neighbours(Tiles(64, Inner(8, 1)), Tiles(64, Inner(8, 1))))
    assert near == {
        Tiles(32, Inner(8, 1)), Tiles(128, Inner(8, 1)), Tiles(64, Inner(4, 1)),
        Tiles(64, Inner(16, 1)), Tiles(64, Inner(8, 2)),
    }  # fmt: skip
    far = set(tune.neighbours(Tiles(256, Inner(8, 1)), Tiles(64, Inner(8, 1))))
    assert {t.rows for t in far} == {128, 256}


def scaled(x, *, impl):
    """Wrong with 16 rows, refused with 256."""
    rows = tiles_for(Sizes(64, x.dtype)).rows
    if rows == 256:
        raise NotImplementedError("too many rows")
    return x * (3.0 if rows == 16 else 2.0)


CASE = DeviceCase(
    "scaled", "n8", lambda key: (jax.random.normal(key, (8,)),), scaled, argnums=(0,),
    flops=(8, 8), tolerance=1e-3,
)  # fmt: skip


def test_the_fastest_right_tiles_win():
    """128 rows are fastest but for 16, which are wrong; inner tiles make no difference."""
    times = {16: 1.0, 32: 8.0, 64: 4.0, 128: 2.0}
    inputs = ((jnp.ones(8),), (jnp.ones(8),))
    question, said = Question("tiles_for", "sizes=width=64, dtype=float32"), []

    class Timed(tune.Tuner):
        def trial(self, tiles):
            clock = lambda program, sets: times[tiles[question].rows] / 1e3  # noqa: E731
            return tune.Tuner(*self)._replace(seconds=clock).trial(tiles)

    expected = [2 * jnp.ones(8), 2 * jnp.ones(8)]
    tuner = Timed(CASE, [inputs], "any", expected, print, Budget(1e6), said.append)
    best, was_ms, ms = tune.tune(tuner, question, Tiles(64))
    assert (best, was_ms, ms) == (Tiles(128), pytest.approx(4.0), pytest.approx(2.0))
    assert any("too many rows" in line for line in said)
    best, *_ = tune.tune(tuner, question, Tiles(32))
    assert best == Tiles(128)
    assert any("rows=16" in line and "wrong by" in line for line in said)


def test_the_command_at_toy_size(tmp_path, monkeypatch, capsys):
    """Few tiles, and a clock that prefers more rows: they are written and taken up."""
    table = tmp_path / "tuned.json"
    monkeypatch.setattr(tune, "once", lambda program, sets: next(clock))
    monkeypatch.setattr(
        tune, "neighbours", lambda tiles, reasoned: [reasoned._replace(rows=reasoned.rows * 2)]
    )
    clock = iter([2e-3, 1e-3, 1e-3])
    arguments = ["--op=gated_norm", f"--table={table}"]
    assert tune.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "2.0000 ms, reasoned" in printed and "1 choices timed on" in printed
    (sizes, entry), *rest = json.loads(table.read_text())[DEVICE]["tiles_for"].items()
    assert not rest and sizes == "num_rows=48, width=32"
    reasoned = gated_norm_tiles.tiles_for(48, 32)
    assert entry["tiles"] == tuning.fields(reasoned._replace(rows=2 * reasoned.rows))
    assert (entry["reasoned_ms"], entry["ms"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--op=kdb"], "Known: kda"), ([], "--op"), (["--op=kda", "--cases=zzz"], "no such case")],
)
def test_bad_input(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        tune.main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err
