"""Recorded loads come back to the count, each step once, whatever happened to the run before."""

import base64
import json
import zlib

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.observability import LoadLog, read_loads
from moejax.observability.loads import relative

LAYERS, EXPERTS = (1, 2, 5), 7


def loads_of(steps):
    """A step's counts are a function of its number, so that sums can be told apart."""
    return {s: np.random.default_rng(s).integers(0, 1000, (len(LAYERS), EXPERTS)) for s in steps}


def write(workdir, steps, *, every=4, first_step=None, saved=(), close=True):
    log = LoadLog(workdir, LAYERS, EXPERTS, every=every, first_step=first_step)
    for step, load in loads_of(steps).items():
        log.add(step, load)
        if step in saved:
            log.flush()
    log.close()
    return log.path


def assert_covers(loads, last):
    """Steps 1 to `last`, each in one record, whose counts are the sums of its steps."""
    steps = [list(range(a, b + 1)) for a, b in zip(loads.first, loads.steps, strict=True)]
    assert sum(steps, []) == list(range(1, last + 1))
    for own, counts in zip(steps, loads.counts, strict=True):
        np.testing.assert_array_equal(counts, sum(loads_of(own).values()))


def test_counts_come_back(tmp_path):
    write(tmp_path, range(1, 13))
    loads = read_loads(tmp_path)
    assert loads.layers == LAYERS and list(loads.steps) == [4, 8, 12]
    assert_covers(loads, 12)
    np.testing.assert_array_equal(loads.last(5), loads.counts[1:].sum(0))
    np.testing.assert_array_equal(loads.last(1000), loads.counts.sum(0))


def test_large_counts_and_a_sparse_layer(tmp_path):
    log = LoadLog(tmp_path, [0], 3, every=1)
    big = np.array([[2**40 + 3, 0, 1]])
    log.add(1, big)
    log.close()
    np.testing.assert_array_equal(read_loads(log.path).counts, big[None])


@pytest.mark.parametrize("killed_after", [6, 7, 8, 9, 11])
@pytest.mark.parametrize("every", [1, 4, 100])
def test_a_resumed_run_has_each_step_once(tmp_path, killed_after, every):
    """Killed between checkpoints, also in the middle of a line; gone on from the last one."""
    path = write(tmp_path, range(1, killed_after + 1), every=every, saved=(3, 6))
    with path.open("a") as file:
        file.write('{"first": 7, "step": 12, "cou')
    write(tmp_path, range(7, 15), every=every, first_step=7, saved=(9, 14))
    assert_covers(read_loads(tmp_path), 14)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_new_run_and_another_model_start_anew(tmp_path):
    write(tmp_path, range(1, 9))
    write(tmp_path, range(1, 5))
    assert_covers(read_loads(tmp_path), 4)
    log = LoadLog(tmp_path, (0,), 2, every=1, first_step=5)
    log.add(5, [[1, 2]])
    log.close()
    assert read_loads(tmp_path).counts.tolist() == [[[1, 2]]]


def test_the_end_of_a_file_may_be_cut_short(tmp_path):
    path = write(tmp_path, range(1, 9))
    text = path.read_text()
    for cut, whole in ((1, 8), (2, 4), (60, 4)):
        path.write_text(text[:-cut])
        assert_covers(read_loads(tmp_path), whole)
        write(tmp_path, range(whole + 1, 13), first_step=whole + 1)
        assert_covers(read_loads(tmp_path), 12)


def _changed(line, **values):
    return json.dumps(json.loads(line) | values) + "\n"


def _text(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize(
    ("number", "damage", "says"),
    [
        (1, lambda line: "{}\n", "no file of expert loads"),
        (1, lambda line: _changed(line, layers="all"), "no file of expert loads"),
        (
            1,
            lambda line: _changed(line, experts=5),
            "line 2, is damaged: not the counts .* 5 experts",
        ),
        (2, lambda line: "nonsense\n", "line 2, is damaged"),
        (3, lambda line: "[1]\n", "line 3, is damaged: it is no whole JSON mapping"),
        (3, lambda line: _changed(line, first=4), "line 3, is damaged: steps 4 to 8 after step 4"),
        (3, lambda line: _changed(line, step="8"), "lacks first, step or counts"),
        (3, lambda line: _changed(line, counts="~~~~"), "its counts cannot be unpacked. Take"),
        (3, lambda line: _changed(line, counts=_text(b"short")), "not the counts of 3 layers"),
        (3, lambda line: _changed(line, counts=_text(bytes(10**6))), "not the counts of 3 layers"),
        (3, lambda line: line.replace(line[60:64], "zzzz"), "line 3, is damaged"),
    ],
    ids=range(11),
)
def test_damage_is_one_line_that_says_where(tmp_path, number, damage, says):
    path = write(tmp_path, range(1, 13))
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = damage(lines[number - 1])
    path.write_text("".join(lines))
    with pytest.raises(ConfigError, match=says) as caught:
        read_loads(tmp_path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_record_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no expert loads at .*log.loads_every > 0"):
        read_loads(tmp_path)
    write(tmp_path, range(1, 3))
    with pytest.raises(ConfigError, match="holds no record yet"):
        read_loads(tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        LoadLog(tmp_path / "file", LAYERS, EXPERTS, every=1)


def test_relative_load():
    got = relative(np.array([[1, 3, 0, 0], [0, 0, 0, 0]]))
    np.testing.assert_array_equal(got, [[1, 3, 0, 0], [0, 0, 0, 0]])


def test_a_record_of_kimi_k3_is_small(tmp_path):
    """92 layers of 896 experts, 100 steps of 4.2 M tokens: 8 bytes a count would be 660 kB."""
    mean = 100 * 4.2e6 * 16 / 896
    counts = mean * np.exp(0.3 * np.random.default_rng(0).standard_normal((92, 896)))
    log = LoadLog(tmp_path, range(1, 93), 896, every=100)
    log.add(100, counts.astype(np.int64))
    log.close()
    assert log.path.stat().st_size < 350_000
    np.testing.assert_array_equal(read_loads(tmp_path).counts[0], counts.astype(np.int64))
