"""The digits' images and the bench's own counting; the model that reads them is the bench's."""

from types import SimpleNamespace

import numpy as np
from PIL import Image

from moejax.data.digits import FIELD, canvas, load_scans, write_digits
from moejax.data.patches import patched
from moejax.train import bench_digits
from moejax.train.bench_digits import blanked, blind, digits_config, draw, held_out, score, shuffled


def test_images_are_what_their_captions_say():
    scans = load_scans()
    assert len(scans["train"].labels) + len(scans["validation"].labels) == 1797
    both = {scan.tobytes() for scan in scans["train"].pixels}
    shared = sum(scan.tobytes() in both for scan in scans["validation"].pixels)
    assert shared == 0
    rng, sizes, counts = np.random.default_rng(0), set(), set()
    for _ in range(300):
        made = canvas(scans["train"], rng)
        height, width = made.pixels.shape
        rows, columns = height // FIELD, width // FIELD
        fields = made.pixels.reshape(rows, FIELD, columns, FIELD).max((1, 3)) > 0
        assert fields.sum() == len(made.caption)
        sizes.add((height, width))
        counts.add(len(made.caption))
    assert sizes == {(28 * r, 28 * c) for r in (1, 2, 3) for c in (1, 2, 3, 4)}
    assert counts == {1, 2, 3, 4, 5, 6}


def test_the_shards_are_read_as_the_bench_reads_them(tmp_path):
    first = [path.read_bytes() for path in write_digits(tmp_path / "a", 20, 10)]
    assert first == [path.read_bytes() for path in write_digits(tmp_path / "b", 20, 10)]
    cfg = digits_config(tmp_path / "a", {"train.num_steps": "7"})
    assert cfg.train.num_steps == 7 and cfg.model.name == "tiny_vision"
    cfg.check(1)
    given = held_out(cfg, 8)
    assert len(given.images) == 8 and all(1 <= len(text) <= 6 for text in given.captions)
    written = [*given.captions[:7], "x"]
    draw(tmp_path / "grid.png", given, written)
    assert Image.open(tmp_path / "grid.png").size[0] == 6 * 260


def test_digits_count_where_they_stand():
    found = score(["12", "1", "9123", ""], ["12", "12", "123", "4"])
    assert found.digits == 3 / 8 and found.exact == 1 / 4
    assert blind(["12", "1", "32", "4"]) == 4 / 6


def test_what_is_done_to_images():
    pixels = np.random.default_rng(0).integers(1, 256, (1, 28, 56, 3), np.uint8)
    image = patched(pixels, 14)
    assert not blanked(image).pixels.any() and blanked(image).grid == image.grid
    other = shuffled(image).pixels
    assert not np.array_equal(other, image.pixels)
    assert sorted(p.tobytes() for p in other) == sorted(p.tobytes() for p in image.pixels)


def test_the_bench_goes_from_images_to_a_report(tmp_path, monkeypatch, capsys):
    """Training and reading themselves are replaced."""
    signals = iter([2, None])

    def run(cfg, workdir):
        return SimpleNamespace(signum=next(signals))

    monkeypatch.setattr(bench_digits, "run", run)
    monkeypatch.setattr(bench_digits, "load", lambda workdir: None)

    def read(model, given, change=None):
        return score(["0" if change else text for text in given.captions], given.captions)

    monkeypatch.setattr(bench_digits, "read", read)
    argv = [f"--workdir={tmp_path}", "--images=10", "--held-out=30", "--config.train.num_steps=3"]
    assert bench_digits.main(argv) == 130
    assert bench_digits.main(argv) == 0
    said = capsys.readouterr().out
    assert "as they are       digits in place 100.0%, captions right 100.0%" in said
    assert "all black" in said and "patches shuffled" in said
    assert (tmp_path / "captions.png").exists()
