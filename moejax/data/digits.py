"""Images that are on every machine with scikit-learn: handwritten digits on canvases, and captions.

    python -m moejax.data.digits --out=data/digits

writes train.tar and validation.tar, WebDataset shards of PNG files. An image has 28 to 112 pixels
by 28 to 84 with 1 to 6 digits, each somewhere inside a field of 28 x 28; its caption is the digits
by rows, left to right. No scan is in both shards.

Source: the digits are those of `sklearn.datasets.load_digits`, 1,797 scans of 8 x 8 (UCI Optical
Recognition of Handwritten Digits).
"""

from __future__ import annotations

import argparse
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moejax.config import ConfigError

FIELD = 28
_COLUMNS, _ROWS, _DIGITS = 4, 3, 6
_SIDES = (18, 27)  # of a digit, in pixels
_HELD_OUT = 5  # every fifth scan


class Canvas(NamedTuple):
    """An image of digits.

    Attributes:
      pixels: uint8 [height, width], white on black.
      caption: the digits in reading order.
    """

    pixels: np.ndarray
    caption: str


class Scans(NamedTuple):
    """Digits to draw from: uint8 [N, 8, 8], and which each is."""

    pixels: np.ndarray
    labels: np.ndarray


def load_scans() -> dict[str, Scans]:
    """The scans of each split.

    Raises:
      ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError("the digits need scikit-learn: pip install scikit-learn.") from error
    found = load_digits()
    pixels = np.minimum(found.images * 16, 255).astype(np.uint8)
    held_out = np.arange(len(pixels)) % _HELD_OUT == 0
    return {
        "train": Scans(pixels[~held_out], found.target[~held_out]),
        "validation": Scans(pixels[held_out], found.target[held_out]),
    }


def canvas(scans: Scans, rng: np.random.Generator) -> Canvas:
    """One image: its size, its digits and their places are drawn."""
    rows, columns = int(rng.integers(1, _ROWS + 1)), int(rng.integers(1, _COLUMNS + 1))
    count = int(rng.integers(1, min(_DIGITS, rows * columns) + 1))
    pixels = np.zeros((rows * FIELD, columns * FIELD), np.uint8)
    fields = np.sort(rng.choice(rows * columns, count, replace=False))
    chosen = rng.integers(0, len(scans.labels), count)
    for field, scan in zip(fields.tolist(), chosen.tolist(), strict=True):
        side = int(rng.integers(*_SIDES))
        top = field // columns * FIELD + int(rng.integers(0, FIELD - side + 1))
        left = field % columns * FIELD + int(rng.integers(0, FIELD - side + 1))
        pixels[top : top + side, left : left + side] = _enlarged(scans.pixels[scan], side)
    return Canvas(pixels, "".join(map(str, scans.labels[chosen])))


def _enlarged(scan: np.ndarray, side: int) -> np.ndarray:
    image = _pillow().fromarray(scan)
    return np.asarray(image.resize((side, side), _pillow().Resampling.BICUBIC))


def png(pixels: np.ndarray) -> bytes:
    """An image as the bytes of a PNG file."""
    file = io.BytesIO()
    _pillow().fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def write_digits(out: str | os.PathLike[str], num_train: int, num_validation: int) -> list[Path]:
    """Writes both shards, the same bytes on every machine with the same Pillow.

    Args:
      out: folder; made if missing.
      num_train, num_validation: images of each.
    Returns:
      The files.
    """
    folder, written = Path(out), []
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": num_train, "validation": num_validation}
    for number, (split, scans) in enumerate(load_scans().items()):
        rng = np.random.Generator(np.random.Philox(number))
        path = folder / f"{split}.tar"
        partial = path.with_name(path.name + ".partial")
        with tarfile.open(partial, "w") as tar:
            for n in range(counts[split]):
                made = canvas(scans, rng)
                _add(tar, f"{n:06}.png", png(made.pixels))
                _add(tar, f"{n:06}.txt", made.caption.encode())
        os.replace(partial, path)
        written.append(path)
    return written


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError("images need Pillow: pip install 'moejax[vision]'.") from error
    return Image


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the shards and says where."""
    parser = argparse.ArgumentParser(
        prog="python -m moejax.data.digits", description="Handwritten digits with captions."
    )
    parser.add_argument("--out", default="data/digits", metavar="DIR")
    parser.add_argument("--images", type=int, default=20_000, metavar="N", help="to train on")
    parser.add_argument("--held-out", type=int, default=1_000, metavar="N")
    options = parser.parse_args(argv)
    paths = write_digits(options.out, options.images, options.held_out)
    print("wrote " + ", ".join(map(str, paths)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
