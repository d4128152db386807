"""Images of any size into buffers of fixed size, and their places in the text. NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.config import ConfigError
from moejax.config.vision import MERGE
from moejax.layers.vision.images import Patches

_GROUP = MERGE * MERGE


class ImageError(ConfigError):
    """An image, or a sample with images, that cannot be used; the message is one line."""


class PatchedImage(NamedTuple):
    """An image or clip in patches, groups of 2 x 2 one behind the other.

    Attributes:
      pixels: [frames * rows * columns, 3, p, p].
      grid: frames, rows, columns, in patches.
    """

    pixels: np.ndarray
    grid: tuple[int, int, int]

    @property
    def num_patches(self) -> int:
        """Places that it takes in a buffer."""
        return len(self.pixels)

    @property
    def num_tokens(self) -> int:
        """Places that it takes in the text: frames of a clip share theirs."""
        return self.grid[1] * self.grid[2] // _GROUP


def patched(frames_FHW3: np.ndarray, patch: int) -> PatchedImage:
    """The patches of an image or clip, [frames, height, width, 3], whose sides 2 p divides."""
    F, height, width, _ = frames_FHW3.shape
    rows, columns = height // patch, width // patch
    apart = frames_FHW3.reshape(F, rows // MERGE, MERGE, patch, columns // MERGE, MERGE, patch, 3)
    ordered = apart.transpose(0, 1, 4, 2, 5, 7, 3, 6)
    return PatchedImage(ordered.reshape(-1, 3, patch, patch), (F, rows, columns))


def grouped_order(grid: tuple[int, int, int]) -> np.ndarray:
    """For each patch in groups, its number when patches count by frames, rows, columns."""
    F, rows, columns = grid
    number = np.arange(F * rows * columns, dtype=np.int32)
    apart = number.reshape(F, rows // MERGE, MERGE, columns // MERGE, MERGE)
    return apart.transpose(0, 1, 3, 2, 4).reshape(-1)


def buffers(
    images: Sequence[PatchedImage], *, num_buffers: int, size: int, patch: int,
    clips: bool = False, dtype: type = np.uint8,
) -> tuple[Patches, list[int]]:  # fmt: skip
    """Images laid into buffers, each whole, in the first one with room.

    Args:
      images: in any order and of any sizes; none is right too.
      num_buffers, size: buffers, and patches in each, a multiple of 4.
      patch: pixels a side of a patch.
      clips: also say frames, for which the tower does more.
      dtype: of the pixels.
    Returns:
      The buffers, and for each image the number of its first feature.
    Raises:
      ImageError: they do not fit; the line says how many are too many.
    """
    if size % _GROUP:
        raise ImageError(
            f"image buffers of {size} patches: 2 x 2 make a token, so 4 must divide it."
        )
    out = Patches(
        pixels=np.zeros((num_buffers, size, 3, patch, patch), dtype),
        image_ids=np.zeros((num_buffers, size), np.int32),
        places=np.zeros((num_buffers, size, 4), np.int32),
        frames=np.full((num_buffers, size), -1, np.int32) if clips else None,
        tokens=np.full((num_buffers, size // _GROUP), -1, np.int32) if clips else None,
    )
    in_buffer = _first_fit(images, num_buffers, size)
    starts = [0] * len(images)
    for b in range(num_buffers):
        inside = [i for i, where in enumerate(in_buffer) if where == b]
        place = size - sum(images[i].num_patches for i in inside)
        for number, i in enumerate(inside, 1):
            _lay(out, b, place, images[i], number)
            starts[i] = (b * size + place) // _GROUP
            place += images[i].num_patches
    return out, starts


def _first_fit(images: Sequence[PatchedImage], num_buffers: int, size: int) -> list[int]:
    room, where = [size] * num_buffers, []
    for number, image in enumerate(images):
        fits = [b for b in range(num_buffers) if room[b] >= image.num_patches]
        if not fits:
            raise ImageError(
                f"image {number + 1} of {len(images)} has {image.num_patches} patches, and "
                f"{num_buffers} buffers of {size} have at most {max(room, default=0)} free."
            )
        where.append(fits[0])
        room[fits[0]] -= image.num_patches
    return where


def _lay(out: Patches, b: int, start: int, image: PatchedImage, number: int) -> None:
    F, rows, columns = image.grid
    span = slice(start, start + image.num_patches)
    out.pixels[b, span] = image.pixels
    out.image_ids[b, span] = number
    order = grouped_order(image.grid)
    frame, inside = np.divmod(order, rows * columns)
    sizes = np.broadcast_to(np.array([rows, columns], np.int32), (len(order), 2))
    out.places[b, span] = np.column_stack([inside // columns, inside % columns, sizes])
    if out.frames is None or out.tokens is None:
        if F > 1:
            raise ImageError(f"a clip of {F} frames, but the buffers are for still images.")
        return
    out.frames[b, span] = frame if F > 1 else -1
    group = np.arange(image.num_patches // _GROUP, dtype=np.int32) % image.num_tokens
    out.tokens[b, span.start // _GROUP : span.stop // _GROUP] = start // _GROUP + group


def check_pads(tokens: np.ndarray, pad_token: int, images: Sequence[PatchedImage], sample: str):
    """Raises ImageError naming the sample unless it has one pad token for each feature."""
    pads = int(np.count_nonzero(np.asarray(tokens) == pad_token))
    features = [image.num_tokens for image in images]
    if pads != sum(features):
        each = " + ".join(map(str, features))
        count = "image" if len(features) == 1 else f"{len(features)} images"
        of = f"its {count} ({each})" if features else "images: it has none"
        raise ImageError(
            f"{sample}: {pads} pad tokens (id {pad_token}) for {sum(features)} image features of "
            f"{of}. There must be one pad token for each feature."
        )


def feature_places(
    tokens: np.ndarray, pad_token: int, images: Sequence[PatchedImage], starts: Sequence[int]
) -> np.ndarray:
    """Which feature stands at each token, -1 where none does.

    Args:
      tokens: int ids of any shape, read row by row; its pads are those of the images in order.
      starts: number of each image's first feature, as `buffers` gives it.
    """
    numbers = [
        np.arange(start, start + image.num_tokens, dtype=np.int32)
        for image, start in zip(images, starts, strict=True)
    ]
    at = np.full(np.shape(tokens), -1, np.int32)
    at[np.asarray(tokens) == pad_token] = np.concatenate(numbers or [np.zeros(0, np.int32)])
    return at
