"""Images of documents: the tokens that stand for them, and their patches when a row is made."""

from __future__ import annotations

import dataclasses
import logging
import os
import stat
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.config import ConfigError, DataConfig, VisionConfig
from moejax.config.vision import MERGE
from moejax.data.image_marks import ImageRef
from moejax.data.image_rows import ImageRoom
from moejax.data.images import image_size, load_patches, size_within
from moejax.data.media_tokens import BEGIN, CONTENT, END, PAD, image_text
from moejax.data.patches import ImageError, PatchedImage

_LOG = logging.getLogger(__name__)
_NAMED = 20  # bad images that are told by name when the data is read; the others are counted


class ImageTokens(NamedTuple):
    """An image as it stands in a text.

    Attributes:
      ref: where it lies.
      ids: its token ids, a pad for each feature.
      grid: rows and columns of patches.
    """

    ref: ImageRef
    ids: np.ndarray
    grid: tuple[int, int]


class ImageRules:
    """How the images of a model become tokens and patches.

    Args:
      vision: the tower's section.
      tokenizer: of the model.
      style: `data.image_style`.
      room: of a run's rows; None: no image is too large.
    Raises:
      ConfigError: the tokenizer has no tokens for the style, or the pad is a token of text.
    """

    def __init__(
        self, vision: VisionConfig, tokenizer: Any, style: str = "auto",
        room: ImageRoom | None = None,
    ):  # fmt: skip
        self.room, self.vision, self.pad_token = room, vision, vision.pad_token
        self._tokenizer, self.style = tokenizer, _style(style, tokenizer)
        if self.style == "bare":
            self._check_bare()
        else:
            self._check_pad()

    @classmethod
    def of(cls, cfg: DataConfig, vision: VisionConfig | None, tokenizer: Any) -> ImageRules | None:
        """Those of a run; None where its rows have no room for images."""
        if not cfg.image_patches or vision is None or not vision.num_layers:
            return None
        return cls(vision, tokenizer, cfg.image_style, ImageRoom.of(cfg, vision))

    def tokens(self, ref: ImageRef) -> ImageTokens:
        """An image's tokens; only the head of the file is read.

        Raises:
          ImageError: it is no image, or too large for a row.
        """
        height, width = image_size(_source(ref), ref.label)
        step = MERGE * self.vision.patch
        new = size_within(height, width, self.vision)
        rows, columns = (MERGE * -(-side // step) for side in new)
        if self.room is not None and rows * columns > self.room.size:
            raise ImageError(
                f"{ref.label}: has {rows} x {columns} patches; data.image_patches="
                f"{self.room.size} have room in a row. Raise it, or lower model.vision.max_patches."
            )
        count = rows * columns // MERGE**2
        return ImageTokens(ref, self._ids(count, width, height), (rows, columns))

    def load(self, tokens: ImageTokens) -> PatchedImage:
        """Its patches. Raises ImageError: the file is damaged, or not what it was."""
        image = load_patches(_source(tokens.ref), tokens.ref.label, self.vision)
        if image.grid[1:] != tokens.grid:
            raise ImageError(f"{tokens.ref.label}: has another size than when the run began.")
        return image

    def blank(self, tokens: ImageTokens) -> PatchedImage:
        """What stands in the place of an image that cannot be loaded."""
        p, (rows, columns) = self.vision.patch, tokens.grid
        return PatchedImage(np.zeros((rows * columns, 3, p, p), np.uint8), (1, rows, columns))

    def _ids(self, count: int, width: int, height: int) -> np.ndarray:
        pads = np.full(count, self.pad_token, np.int32)
        if self.style == "bare":
            return pads
        text = image_text(self.style, 1, width=width, height=height)
        ids = self._tokenizer.encode(text, specials=True)
        at = int(np.flatnonzero(ids == self.pad_token)[0])
        return np.concatenate([ids[:at], pads, ids[at + 1 :]]).astype(np.int32)

    def _check_bare(self) -> None:
        if self.pad_token < self._tokenizer.vocab_size:
            raise ConfigError(
                f"model.vision.pad_token={self.pad_token} is a token of texts: the tokenizer "
                f"{self._tokenizer.name} has ids below {self._tokenizer.vocab_size}. Use that or a "
                "higher one, and a model.vocab_size above it."
            )

    def _check_pad(self) -> None:
        ids = self._tokenizer.encode(PAD, specials=True)
        if len(ids) != 1 or ids[0] != self.pad_token:
            found = f"has id {ids[0]}" if len(ids) == 1 else "is no token"
            raise ConfigError(
                f"model.vision.pad_token={self.pad_token}, but {PAD} {found} in "
                f"{self._tokenizer.name}. Set it so, or data.image_style='bare'."
            )


def _style(asked: str, tokenizer: Any) -> str:
    if asked != "auto":
        return asked
    names = (BEGIN, CONTENT, PAD, END)
    knows = all(len(tokenizer.encode(name, specials=True)) == 1 for name in names)
    return "kimi_k3" if knows else "bare"


def _source(ref: ImageRef) -> bytes | str:
    try:
        # By name: opening a named pipe waits for a writer, and a device may have no end.
        if not stat.S_ISREG(os.stat(ref.file).st_mode):
            raise ImageError(
                f"{ref.label}: is no regular file but a folder, a pipe or a device. Name a file."
            )
        return ref.source()
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        words = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise ImageError(f"{ref.label}: cannot be read ({words}).") from error


@dataclasses.dataclass(frozen=True)
class DocumentImages:
    """The images of tokenized documents.

    Attributes:
      rules: of the run.
      images: those of each document, in the order of its tokens.
      num_patches: int64, how many each document takes in a row's buffer.
      num_bad: documents left out because of an image.
      names: of the documents.
      told: those that were found damaged, so that each is told once.
    """

    rules: ImageRules
    images: list[tuple[ImageTokens, ...]]
    num_patches: np.ndarray
    num_bad: int
    names: Sequence[str]
    told: set[int] = dataclasses.field(default_factory=set)

    @property
    def room(self) -> int:
        """Patches that a row has room for."""
        assert self.rules.room is not None
        return self.rules.room.size

    def of_row(self, documents: Sequence[int], row: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A row with its images.

        A document with an image that cannot be loaded keeps its place, and nothing of it is
        learned: what else stands in a row must not depend on it.

        Args:
          documents: those in the row, in the order of its segments 1, 2, ...
          row: tokens, labels and segments.
        Returns:
          The row with the arrays of `ImageRoom.shapes`, and int32 `bad_images`: how many documents
          have a bad one, the first document, and 0, where a mixture puts its member's number.
        """
        loaded, bad = [], 0
        for segment, document in enumerate(documents, 1):
            own, failed = self._load(document)
            loaded += own
            if failed:
                bad += 1
                row["labels"] = np.where(row["segment_ids"] == segment, -100, row["labels"])
        assert self.rules.room is not None
        filled = self.rules.room.filled(row["tokens"], self.rules.pad_token, loaded)
        return row | filled | {"bad_images": np.array([bad, documents[0], 0], np.int32)}

    def _load(self, document: int) -> tuple[list[PatchedImage], bool]:
        images, failed = [], False
        for one in self.images[document]:
            try:
                images.append(self.rules.load(one))
            except ImageError as error:
                if document not in self.told:
                    name = self.names[document]
                    _LOG.warning("%s: %s Nothing of the sample is learned.", name, error)
                images.append(self.rules.blank(one))
                failed = True
        if failed:
            self.told.add(document)
        return images, failed


def complete(row: dict[str, np.ndarray], room: ImageRoom | None) -> dict[str, np.ndarray]:
    """A row with buffers for images, where rows have them; as it is where it has its own."""
    if room is None or "feature_at" in row:
        return row
    return row | room.empty(len(row["tokens"])) | {"bad_images": np.zeros(3, np.int32)}


def tell_bad(messages: Sequence[str], say: Callable[..., None] = _LOG.warning) -> None:
    """A line for each sample that is left out because of an image; of very many, some."""
    for message in messages[:_NAMED]:
        say("%s The sample is left out.", message)
    if len(messages) > _NAMED:
        say("%d more samples are left out because of their images.", len(messages) - _NAMED)
