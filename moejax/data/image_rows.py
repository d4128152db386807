"""The images of a row: its buffer of patches, and where their features stand among its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.config import DataConfig, VisionConfig
from moejax.data.patches import PatchedImage, buffers, feature_places


class ImageRoom(NamedTuple):
    """What a row holds for images, the same for every row of a run.

    Attributes:
      size: patches of its buffer.
      patch: pixels a side of a patch.
    """

    size: int
    patch: int

    @classmethod
    def of(cls, cfg: DataConfig, vision: VisionConfig) -> ImageRoom | None:
        """That of a run; None where rows have no images."""
        return cls(cfg.image_patches, vision.patch) if cfg.image_patches else None

    def shapes(self, seq_len: int) -> dict[str, tuple[tuple[int, ...], type]]:
        """Shape and dtype of a row's arrays, see `moejax.layers.vision.images.images_of`."""
        return {
            "pixels": ((self.size, 3, self.patch, self.patch), np.uint8),
            "image_ids": ((self.size,), np.int32),
            "places": ((self.size, 4), np.int32),
            "feature_at": ((seq_len,), np.int32),
        }

    def empty(self, seq_len: int) -> dict[str, np.ndarray]:
        """The arrays of a row without images."""
        arrays: dict[str, np.ndarray] = {
            name: np.zeros(shape, dtype) for name, (shape, dtype) in self.shapes(seq_len).items()
        }
        arrays["feature_at"] -= 1
        return arrays

    def filled(
        self, tokens: np.ndarray, pad_token: int, images: Sequence[PatchedImage]
    ) -> dict[str, np.ndarray]:
        """The arrays of a row with images.

        Args:
          tokens: of the row, with a pad for each feature of the images in their order.
          pad_token: the pads' id.
          images: their patches fit the buffer.
        """
        return row_buffers(tokens, pad_token, images, self.size, self.patch)


def row_buffers(
    tokens: np.ndarray, pad_token: int, images: Sequence[PatchedImage], size: int, patch: int
) -> dict[str, np.ndarray]:
    """`ImageRoom.filled` for any room: `size` patches of `patch` pixels a side."""
    laid, starts = buffers(images, num_buffers=1, size=size, patch=patch)
    return {
        "pixels": laid.pixels[0],
        "image_ids": laid.image_ids[0],
        "places": laid.places[0],
        "feature_at": feature_places(tokens, pad_token, images, starts),
    }
