"""From an image file to patches: decoded, shrunk where it is too large, padded, cut.

What cannot be right is an :class:`ImageError` that names the file and says why; nothing that stands
in a file raises anything else. Architecture section 8.1.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.config import VisionConfig
from moejax.config.vision import MERGE
from moejax.data.patches import ImageError, PatchedImage, patched

# A decoded pixel is 3 bytes: 300 MB. Files that say they are larger are not decoded.
MAX_PIXELS = 100_000_000
_ORIENTATION = 0x0112  # of Exif; 5 to 8 lie on a side
_ANIMATED = ("GIF", "PNG", "WEBP", "TIFF")  # further images of other formats are previews


def load_patches(
    source: bytes | str | os.PathLike[str], name: str, cfg: VisionConfig
) -> PatchedImage:
    """An image file, or its bytes, in patches.

    Args:
      source: a path, or what stands in the file.
      name: what an error calls it, a file and perhaps a line.
      cfg: patch size and limits.
    Returns:
      A PatchedImage of bytes.
    Raises:
      ImageError: it cannot be read, or not rightly.
    """
    return prepared(read_image(source, name), cfg)


def prepared(image_HW3: np.ndarray, cfg: VisionConfig) -> PatchedImage:
    """A decoded image in patches: shrunk to the limits by cubic interpolation, never enlarged, and
    padded with zeros at the bottom and the right to whole groups of 2 x 2 patches.

    Args:
      image_HW3: uint8.
      cfg: patch size and limits.
    """
    height, width, _ = image_HW3.shape
    new_height, new_width = size_within(height, width, cfg)
    if (new_height, new_width) != (height, width):
        image = _pillow().fromarray(image_HW3)
        image_HW3 = np.asarray(image.resize((new_width, new_height), _pillow().Resampling.BICUBIC))
    step = MERGE * cfg.patch
    room = ((0, -new_height % step), (0, -new_width % step), (0, 0))
    return patched(np.pad(image_HW3, room)[None], cfg.patch)


def size_within(height: int, width: int, cfg: VisionConfig) -> tuple[int, int]:
    """Height and width that an image is shrunk to; its own where the limits allow it.

    As released, the scale follows from whole patches inside the image; where padding then exceeds
    the limit, it is lowered until nothing does.
    """
    side = cfg.max_side // MERGE * MERGE * cfg.patch
    inside = max(1, height // cfg.patch) * max(1, width // cfg.patch)
    scale = min(1.0, math.sqrt(cfg.max_patches / inside), side / height, side / width)
    while True:
        new = tuple(min(side, max(1, int(n * scale))) for n in (height, width))
        count = math.prod(MERGE * -(-n // (MERGE * cfg.patch)) for n in new)
        if count <= cfg.max_patches:
            return new[0], new[1]
        scale *= math.sqrt(cfg.max_patches / count)


def image_size(source: bytes | str | os.PathLike[str], name: str) -> tuple[int, int]:
    """Height and width of the picture in a file, upright; only its head is read.

    Args:
      source, name: as in `read_image`, which may still find the rest damaged.
    Raises:
      ImageError: as there.
    """
    with _named(name):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _pillow().open(file) as image:
            _check_header(image, name)
            # A PNG file without this chunk in front would be decoded to look for it at the end.
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
            turned = exif.get(_ORIENTATION, 1) in (5, 6, 7, 8)
            return image.size if turned else image.size[::-1]


def read_image(source: bytes | str | os.PathLike[str], name: str) -> np.ndarray:
    """The picture in a file as a viewer shows it: upright, in RGB, over white where transparent.

    Args:
      source: a path, or what stands in the file.
      name: what an error calls it.
    Returns:
      uint8 [height, width, 3].
    Raises:
      ImageError: it cannot be decoded, is empty, too large to decode, animated, or its values have
        no known range.
    """
    with _named(name):
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _pillow().open(file) as image:
            _check_header(image, name)
            image.load()
            return np.asarray(_as_rgb(image, name))


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """What a decoder raises on a broken file, which may be anything, as an error with its name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of metadata, and of sizes that are checked here
            yield
    except ImageError:
        raise
    except Exception as error:
        kind = type(error).__name__
        if kind == "UnidentifiedImageError":  # its words name an object in memory
            raise ImageError(
                f"{name}: cannot be decoded: it is no image that Pillow knows, or its head is "
                "damaged."
            ) from error
        if kind == "DecompressionBombError":  # its words name Pillow's limit
            raise ImageError(
                f"{name}: is too large to decode; the limit is {MAX_PIXELS // 10**6} million "
                "pixels."
            ) from error
        words = " ".join(str(error).split()) or "no more is known"
        raise ImageError(f"{name}: cannot be decoded ({kind}: {words}).") from error


def _check_header(image: Any, name: str) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise ImageError(f"{name}: is empty, {width} x {height} pixels.")
    if width * height > MAX_PIXELS:
        raise ImageError(
            f"{name}: is too large to decode, {width} x {height} pixels; the limit is "
            f"{MAX_PIXELS // 10**6} million."
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format in _ANIMATED:
        raise ImageError(
            f"{name}: holds {frames} images ({image.format}), not one. Save the one that is meant."
        )


def _as_rgb(image: Any, name: str) -> Any:
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        return _from_16_bits(np.asarray(image), image.mode, name).convert("RGB")
    if image.mode == "F":
        raise ImageError(f"{name}: has floating-point values, whose range is not known.")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = _pillow().new("RGBA", image.size, "white")
        return _pillow().alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _from_16_bits(values: np.ndarray, mode: str, name: str) -> Any:
    """Grey values of 16 bits in 8; Pillow's own conversion would cut them off at 255."""
    if values.min() < 0 or values.max() > 65535:
        raise ImageError(
            f"{name}: has values from {values.min()} to {values.max()} (mode {mode}), whose range "
            "is not known."
        )
    return _pillow().fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("images need Pillow: pip install 'moejax[vision]'.") from error
    return Image
