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
    assert "busiest expert / device mean" in shown.out.splitlines()[1]
    assert shown.out.rstrip().endswith("placement.json --config.placement.copies=1)")
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
        (("--devices=4", "--config.mesh.expert=2"), "has no --config.FIELD"),
        (("--devices=4", "--config.nope=3"), "has no --config.FIELD"),
    ],
)
def test_what_cannot_be_is_one_line(moejax, tmp_path, options, said):
    recorded(tmp_path)
    shown = moejax("place", f"--workdir={tmp_path}", *options)
    assert shown.code == 2 and said in shown.err and shown.err.count("\n") == 1
    assert not (tmp_path / "placement.json").exists()


def test_where_no_file_can_be_nothing_is_left(moejax, tmp_path):
    recorded(tmp_path)
    folder = tmp_path / "there"
    folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    asked = ("place", f"--workdir={tmp_path}", "--devices=4")
    for out, said in (
        (folder, f"--out={folder} is a folder: name the file to write"),
        (tmp_path / "none" / "x.json", f"there is no folder {tmp_path / 'none'}. Make it"),
        (tmp_path / ("x" * 254), "cannot be written to"),
    ):
        shown = moejax(*asked, f"--out={out}")
        assert shown.code == 2 and said in shown.err and ".tmp" not in shown.err
        assert shown.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def refused(path, content, like) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        read_placement(path, like)
    line = str(caught.value)
    assert f"placement.file={path}" in line and "\n" not in line and "moejax place" in line
    return line


def test_a_file_that_does_not_fit_is_one_line(moejax, tmp_path):
    recorded(tmp_path)
    moejax("place", f"--workdir={tmp_path}", "--devices=4", "--copies=2")
    path = tmp_path / "placement.json"
    content = json.loads(path.read_text())
    said = refused(path, content, canonical(3, E, Spread(8, 2)))
    assert "on 4 devices; this run has 3 of 16 on mesh.expert=8" in said
    for copies in (0, 1):
        said = refused(path, content, canonical(3, E, Spread(4, copies)))
        assert f"has 2 copies a device, but placement.copies={copies}. Set placement.co" in said
    more, _ = read_placement(path, canonical(3, E, Spread(4, 3)))
    np.testing.assert_array_equal(more.copies_LPc[..., :2], content["copies"])
    assert np.all(more.copies_LPc[..., 2] == E)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_placement(tmp_path / "none.json", canonical(3, E, Spread(4)))


PLAIN = canonical(3, E, Spread(4, 2))
CONTENT = {
    "format": "moejax expert placement 1", "devices": 4,
    "slots": PLAIN.slots_LE.tolist(), "copies": PLAIN.copies_LPc.tolist(),
}  # fmt: skip


def with_copies(device: int, *experts: int) -> dict:
    copies = PLAIN.copies_LPc.copy()
    copies[1, device] = experts
    return CONTENT | {"copies": copies.tolist()}


@pytest.mark.parametrize(
    "content,said",
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ([], "it holds [] where an object"),
        ({}, "it has no field `format`"),
        ({k: v for k, v in CONTENT.items() if k != "copies"}, "it has no field `copies`"),
        (CONTENT | {"format": "x"}, '`format` is "x", and must be "moejax'),
        (CONTENT | {"devices": "4"}, '`devices` is "4", and must be a whole number'),
        (CONTENT | {"devices": True}, "`devices` is true"),
        (CONTENT | {"devices": 2}, "on 4 devices, but `slots` for 3 layers, and `devices` is 2"),
        (CONTENT | {"slots": 5}, "`slots` must have a whole number for each layer, expert, but"),
        (CONTENT | {"slots": [[1, 2], [3]]}, "its lists differ in length or depth"),
        (CONTENT | {"slots": (PLAIN.slots_LE + 0.5).tolist()}, "but is [[0.5, 1.5"),
        (CONTENT | {"slots": [[0] * E] * 3}, "row 0 of `slots` is no permutation"),
        (CONTENT | {"slots": (PLAIN.slots_LE + np.int64(2**32)).tolist()}, "no permutation"),
        (CONTENT | {"copies": [[[1]]]}, "`copies` is for 1 layers on 1 devices"),
        (CONTENT | {"copies": [1, 2]}, "each layer, device, copy, but is [1, 2]"),
        (with_copies(0, E, 17), "must have experts 0 to 15, or 16 for none"),
        (with_copies(0, E, 2), "row 1 of `copies` repeats expert 2 on device 0, which has it"),
        (with_copies(0, 9, 9), "row 1 of `copies` repeats expert 9 on device 0, which has it"),
    ],
)
def test_a_damaged_file_is_told_in_plain_words(tmp_path, content, said):
    assert said in refused(tmp_path / "placement.json", content, PLAIN)


def test_no_expert_is_on_more_devices_than_a_table_has_places_for(tmp_path):
    like = canonical(1, 32, Spread(32, 1))
    copies = np.full((1, 32, 1), 32)
    copies[0, 1:17] = 0
    content = CONTENT | {"devices": 32, "slots": like.slots_LE.tolist(), "copies": copies.tolist()}
    assert "more than 16 devices" in refused(tmp_path / "placement.json", content, like)
