"""Bench: a small model learns to read handwritten digits, and what it reads without seeing.

    python -m moejax.train.bench_digits --workdir=runs/digits

makes the images (`moejax.data.digits`), trains `configs/tiny_vision.py` by the ordinary loop, and
lets the model write captions of held-out images, whose digits were written by nobody it has seen:
as they are, all black, and with their patches in another order. A caption has a digit in place
where the image has it at the same place of its reading order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.config import RunConfig
from moejax.config.load import load_config
from moejax.data.digits import write_digits
from moejax.data.image_marks import ImageRef, split_marks
from moejax.data.images import load_patches, read_image
from moejax.data.patches import PatchedImage
from moejax.data.sources import load_corpus
from moejax.generate import Buckets, Generator, LanguageModel, load
from moejax.train.bench_fields import parse_with_fields
from moejax.train.run import run

_LONGEST = 8  # tokens of a caption; the longest has six and its end


class HeldOut(NamedTuple):
    """Held-out images.

    Attributes:
      files: where they lie.
      captions: what stands on them.
      images: in patches.
    """

    files: list[ImageRef]
    captions: list[str]
    images: list[PatchedImage]


class Reading(NamedTuple):
    """How well captions were written.

    Attributes:
      digits: share of the images' digits that stand at their place.
      exact: share of the captions that are right.
      captions: what was written.
    """

    digits: float
    exact: float
    captions: list[str]


def digits_config(data: Path, overrides: dict[str, str]) -> RunConfig:
    """`configs/tiny_vision.py` on the images of a folder."""
    base = load_config("tiny_vision")
    mixture = []
    for member in base.data.mixture:
        given: dict[str, Any] = {
            "name": member.name, "source": member.source, "weight": member.weight
        }  # fmt: skip
        if member.source == "webdataset":
            given["paths"] = (str(data / "train.tar"),)
            given["validation_paths"] = (str(data / "validation.tar"),)
        mixture.append(given)
    return load_config("tiny_vision", {"data.mixture": tuple(mixture)} | overrides)


def held_out(cfg: RunConfig, limit: int) -> HeldOut:
    """The first images of the held-out shard."""
    member = next(m for m in cfg.data.mixture if m.source == "webdataset")
    corpus = load_corpus(member, "validation")
    records = [json.loads(text) for text in corpus.texts[:limit]]
    files = [
        next(part for part in split_marks(one["prompt"]) if isinstance(part, ImageRef))
        for one in records
    ]
    images = [load_patches(ref.source(), ref.label, cfg.model.vision) for ref in files]
    return HeldOut(files, [one["completion"] for one in records], images)


def read(model: LanguageModel, given: HeldOut, change: Callable | None = None) -> Reading:
    """Captions that the model writes, most likely tokens one after the other.

    Args:
      model: with a tokenizer of bytes.
      given: the images.
      change: what is done to each image before.
    """
    assert model.tokenizer is not None
    images = [change(image) if change else image for image in given.images]
    pad = model.config.vision.pad_token
    generator = Generator(model.parts, buckets=Buckets(batch=64))
    tokens = generator.generate(
        model.params, model.balance, [[pad] * image.num_tokens for image in images],
        max_new_tokens=_LONGEST, stop=model.tokenizer.stop_ids,
        images=[[image] for image in images],
    )  # fmt: skip
    written = [model.tokenizer.decode(np.array(row, np.int32)) for row in tokens]
    return score(written, given.captions)


def score(written: Sequence[str], wanted: Sequence[str]) -> Reading:
    """How many digits are in place, and how many captions right."""
    pairs = list(zip(written, wanted, strict=True))
    hits = sum(a == b for got, want in pairs for a, b in zip(got, want, strict=False))
    digits = hits / sum(map(len, wanted))
    return Reading(digits, float(np.mean([got == want for got, want in pairs])), list(written))


def blind(wanted: Sequence[str]) -> float:
    """Digits in place of the best guess that sees nothing: at each place its most frequent one."""
    places = [[text[p] for text in wanted if len(text) > p] for p in range(max(map(len, wanted)))]
    hits = sum(max(digits.count(one) for one in set(digits)) for digits in places)
    return hits / sum(map(len, wanted))


def blanked(image: PatchedImage) -> PatchedImage:
    """An image of the same size, all black."""
    return image._replace(pixels=np.zeros_like(image.pixels))


def shuffled(image: PatchedImage) -> PatchedImage:
    """The same patches at other places."""
    order = np.random.default_rng(len(image.pixels)).permutation(len(image.pixels))
    return image._replace(pixels=image.pixels[order])


def draw(path: Path, given: HeldOut, written: Sequence[str], count: int = 24) -> None:
    """A grid of images with the captions that the model wrote; wrong ones say what is right."""
    from PIL import Image, ImageDraw

    columns, width, height, zoom = 6, 260, 226, 2
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    pen = ImageDraw.Draw(sheet)
    for n in range(min(count, len(written))):
        ref, got, want = given.files[n], written[n], given.captions[n]
        x, y = n % columns * width + 16, n // columns * height + 12
        image = Image.fromarray(read_image(ref.source(), ref.label))
        sheet.paste(image.resize((image.width * zoom, image.height * zoom), 0), (x, y))
        right = got == want
        text = got if right else f"{got!r}, is {want}"
        pen.text((x, y + 3 * 28 * zoom + 6), text, fill="green" if right else "red", font_size=26)
    sheet.save(path)


def report(model: LanguageModel, given: HeldOut, picture: Path | None) -> dict[str, float]:
    """Reads the images in every way, prints a line each, and draws the first ones."""
    figures: dict[str, float] = {}
    ways = {"as they are": None, "all black": blanked, "patches shuffled": shuffled}
    print(f"{len(given.captions)} held-out images, {sum(map(len, given.captions))} digits")
    for name, change in ways.items():
        found = read(model, given, change)
        print(f"  {name:17} digits in place {found.digits:6.1%}, captions right {found.exact:6.1%}")
        figures |= {f"{name}: digits": found.digits, f"{name}: captions": found.exact}
        if change is None and picture is not None:
            draw(picture, given, found.captions)
            print(f"  picture: {picture}")
    print(f"  {'best blind guess':17} digits in place {blind(given.captions):6.1%}")
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the data, trains, reads; a folder that has some of it goes on from there."""
    parser = argparse.ArgumentParser(
        prog="python -m moejax.train.bench_digits", description=__doc__.partition("\n")[0],
        epilog="--config.FIELD=VALUE changes a field of configs/tiny_vision.py.",
    )  # fmt: skip
    parser.add_argument("--workdir", default="runs/digits", metavar="DIR")
    parser.add_argument("--images", type=int, default=20_000, metavar="N", help="to train on")
    parser.add_argument("--held-out", type=int, default=500, metavar="N", help="to read")
    options, overrides = parse_with_fields(parser, argv)
    workdir = Path(options.workdir)
    data = workdir / "images"
    if not (data / "validation.tar").exists():
        write_digits(data, options.images, max(options.held_out, 1000))
    cfg = digits_config(data, overrides)
    began, cpu = time.perf_counter(), time.process_time()
    cfg.check(len(jax.devices()))
    result = run(cfg, workdir)
    if result.signum is not None:  # called again, it goes on
        return 128 + result.signum
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    print(f"trained for {seconds:.0f} s, {used:.0f} s of processor time")
    report(load(workdir), held_out(cfg, options.held_out), workdir / "captions.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
