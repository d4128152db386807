"""`moejax place`: from recorded loads to a placement, in words, as JSON and as a file."""

import json

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.layers.moe.placement import Spread, canonical, device_loads, imbalance, place
from moejax.observability.loads import LoadLog
from moejax.train.placement_file import read_placement

LAYERS, E, STEPS = (1, 2, 4), 16, 6


def recorded(workdir) -> np.ndarray:
    """A run's loads: skewed in another way in each layer, and other ones in the first steps."""
    share = 1 / np.arange(1, E + 1) ** 0.8
    rng = np.random.default_rng(0)
    log = LoadLog(workdir, LAYERS, E, every=2)
    newest = np.zeros((len(LAYERS), E), np.int64)
    orders = [rng.permutation(E) for _ in LAYERS]
    for step in range(1, STEPS + 1):
        rows = [share[order] if step > 2 else share for order in orders]
        load_LE = rng.poisson(1000 * np.stack(rows))
        log.add(step, load_LE)
        newest += load_LE if step > 2 else 0
    log.close()
    return newest


def test_the_fullest_device_before_and_after(moejax, tmp_path):
    load_LE = recorded(tmp_path)
    shown = moejax("place", f"--workdir={tmp_path}", "--devices=4", "--steps=4", "--copies=1")
    assert shown.code == 0 and "loads of steps 3 to 6" in shown.out
    spread = Spread(4, 1)
    plain, want = canonical(len(LAYERS), E, spread), place(load_LE, spread)
    before, after = (imbalance(device_loads(load_LE, p)) for p in (plain, want))
    lines = [line.split() for line in shown.out.splitlines()]
    table = {line[0]: line[1:3] for line in lines[2:-1]}
    for layer, *values in zip(LAYERS, before, after, strict=True):
        assert table[str(layer)] == [f"{value:.3f}" for value in values]
    assert table["max"] == [f"{values.max():.3f}" for values in (before, after)]
    assert before.max() > 1.2 and after.max() < 1.01
    got, sha = read_placement(tmp_path / "placement.json", plain)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True)) and len(sha) == 64


def test_json_and_another_file(moejax, tmp_path):
    recorded(tmp_path)
    out = tmp_path / "even.json"
    asked = ("place", f"--workdir={tmp_path}", "--devices=8", f"--out={out}", "--json")
    facts = json.loads(moejax(*asked).out)
    first = out.read_bytes()
    assert facts["file"] == str(out) and facts["devices"] == 8 and facts["steps"] == [1, 6]
    assert [row["layer"] for row in facts["layers"]] == list(LAYERS)
    assert facts["after"]["max"] == max(row["after"] for row in facts["layers"])
    moejax(*asked)
    assert out.read_bytes() == first


@pytest.mark.parametrize(
    "options,said",
    [
        ((), "config.json"),
        (("--devices=5",), "does not divide 16 experts. Near are 1, 2, 4, 8."),
        (("--devices=4", "--copies=65"), "from 0 to 64"),
    ],
)
def test_what_cannot_be_is_one_line(moejax, tmp_path, options, said):
    recorded(tmp_path)
    shown = moejax("place", f"--workdir={tmp_path}", *options)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "placement.json").exists()


def test_a_file_that_does_not_fit_is_one_line(moejax, tmp_path):
    recorded(tmp_path)
    moejax("place", f"--workdir={tmp_path}", "--devices=4")
    path = tmp_path / "placement.json"
    with pytest.raises(ConfigError, match=r"on 4 devices; this run has 3 of 16 on mesh.expert=8"):
        read_placement(path, canonical(3, E, Spread(8)))
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"copies": np.full((3, 4, 5), 7).tolist()}))
    with pytest.raises(ConfigError, match="more than 16 devices"):
        read_placement(path, canonical(3, E, Spread(4)))
    content["slots"][1][0] = content["slots"][1][1]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="no permutation"):
        read_placement(path, canonical(3, E, Spread(4)))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is no placement"):
        read_placement(path, canonical(3, E, Spread(4)))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_placement(tmp_path / "none.json", canonical(3, E, Spread(4)))
