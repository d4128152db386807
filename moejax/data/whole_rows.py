"""Rows of whole documents, for conversations: an answer always stands behind its own prompt.

A document that is longer than a row is left out, or loses the beginning of its prompt. The others
are put into as few rows as best fit finds, once for all epochs: what is packed with what is no
matter, since segments do not see each other, and an epoch is then a fixed number of rows.
"""

import bisect
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from moejax.config import ConfigError

if TYPE_CHECKING:
    from moejax.data.packing import Documents, Row

IGNORED = -100


class WholeRows:
    """The rows of one packing, each made when it is asked for.

    Args:
      documents: the tokens, and which are learned (`documents.trained`).
      order: document indices; it decides which of equally long documents stand together.
      seq_len: T, tokens a row.

    Attributes:
      num_rows: of the packing.
      num_tokens: tokens in them.
      num_labels: positions that have a label.
      num_bytes: bytes of the learned texts in them.
      num_left_out: documents that are in no row, for whatever reason.
      num_dropped, num_truncated: documents that were too long.
      num_crowded: documents with more patches of images than a row has room for.
    """

    def __init__(self, documents: "Documents", order: Int[np.ndarray, "X"], seq_len: int):
        self._documents, self._seq_len = documents, seq_len
        learned, bytes_of = documents.trained, documents.trained_bytes
        assert learned is not None and bytes_of is not None
        starts, self.num_truncated = _fitting_starts(documents, seq_len)
        self.num_crowded, images = 0, documents.images
        if images is not None:
            crowded = (images.num_patches > images.room) & (starts >= 0)
            self.num_crowded, starts = int(crowded.sum()), np.where(crowded, -1, starts)
            self._first_crowded = int(np.argmax(crowded))
        kept = order[starts[order] >= 0]
        self.num_left_out = len(order) - len(kept)
        self.num_dropped = self.num_left_out - self.num_crowded
        self._starts, self._stops = starts, documents.starts[1:]
        lengths = (self._stops - starts)[kept]
        if images is None:
            rows = best_fit(lengths, seq_len)
        else:
            self.num_dropped -= images.num_bad
            rows = fit_both(lengths, seq_len, images.num_patches[kept], images.room)
        # In the order's own sequence again: the first rows are then no others than the last.
        rows = sorted([sorted(row) for row in rows])
        self._members = kept[[place for row in rows for place in row]].astype(np.int64)
        self._rows = np.cumsum([0, *map(len, rows)])
        self.num_rows = self.num_full = len(rows)
        self.num_tokens = int((self._stops - starts)[kept].sum())
        before = np.concatenate([[0], np.cumsum(learned)])
        self.num_labels = int((before[self._stops[kept]] - before[starts[kept] + 1]).sum())
        self.num_bytes = int(bytes_of[kept].sum())

    @property
    def crowded_words(self) -> str:
        """How many are left out because of the patches of their images, and one of them."""
        images, first = self._documents.images, self._first_crowded
        assert images is not None
        return (
            f"{self.num_crowded:,} conversations are left out: their images have together more "
            f"patches than data.image_patches={images.room}, those of {images.names[first]} "
            f"{images.num_patches[first]:,}. Raise it, or take images out"
        )

    def check_filled(self, what: str) -> None:
        """Raises ConfigError when there is no row; `what` says of which data."""
        if self.num_rows:
            return
        lengths = np.diff(self._documents.starts)
        if not lengths.any():
            raise ConfigError(f"{what} has no conversation whose images can be used.")
        if self.num_crowded == len(lengths) - (lengths == 0).sum():
            raise ConfigError(f"{what} is empty: {self.crowded_words}.")
        fit = (lengths <= self._seq_len).sum()
        if fit:
            why = f"{fit:,} are short enough, but no answer in them is learned. Check data.train_on"
        elif self._documents.too_long == "drop":
            why = f"the shortest has {lengths.min():,} tokens. Raise it, or set "
            why += "data.too_long='truncate'"
        else:
            why = f"the shortest has {lengths.min():,} tokens, and no answer fits. Raise it"
        raise ConfigError(
            f"{what} has no conversation that fits data.seq_len={self._seq_len}: {why}."
        )

    def row(self, index: int) -> "Row":
        """Row `index` of `num_rows`, padded in front.

        Returns:
          int32 arrays [T]: `tokens`; `segment_ids`, 1, 2, ... along the row, 0 for padding;
          `labels`, the next token of the same segment where that is learned, else -100. Of
          documents with images also what `DocumentImages.of_row` says.
        """
        documents = self._in_row(index)
        spans = [slice(self._starts[d], self._stops[d]) for d in documents]
        lengths = [span.stop - span.start for span in spans]
        padding = self._seq_len - sum(lengths)
        eos = np.full(padding, self._documents.eos_id)
        tokens = np.concatenate([eos, *(self._documents.tokens[span] for span in spans)])
        labels = np.full(self._seq_len, IGNORED, np.int32)
        at = padding
        trained = self._documents.trained
        assert trained is not None  # conversations always say what is learned
        for span, length in zip(spans, lengths, strict=True):
            learned = trained[span][1:]
            following = tokens[at + 1 : at + length]
            labels[at : at + length - 1] = np.where(learned, following, IGNORED)
            at += length
        segment_ids = np.repeat(np.arange(len(spans) + 1, dtype=np.int32), [padding, *lengths])
        row = {"tokens": tokens.astype(np.int32), "segment_ids": segment_ids, "labels": labels}
        images = self._documents.images
        return row if images is None else images.of_row(documents.tolist(), row)

    def document_ids(self, index: int) -> Int[np.ndarray, "T"]:
        """Which document each token of row `index` is of; -1 where the row is padded."""
        documents = self._in_row(index)
        lengths = self._stops[documents] - self._starts[documents]
        padding = self._seq_len - int(lengths.sum())
        return np.repeat(np.asarray([-1, *documents], np.int32), [padding, *lengths])

    def _in_row(self, index: int) -> Int[np.ndarray, "X"]:
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        return self._members[self._rows[index] : self._rows[index + 1]]


def _fitting_starts(documents: "Documents", seq_len: int) -> tuple[Int[np.ndarray, "X"], int]:
    """Where each document begins when it has to fit a row, -1 for one that does not; how many are
    cut.

    A cut takes tokens in front of the first learned one, and leaves one of them at least.
    """
    assert documents.trained is not None
    starts, stops = documents.starts[:-1], documents.starts[1:]
    learned = np.append(np.flatnonzero(documents.trained), len(documents.tokens))
    first = learned[np.searchsorted(learned, starts)]
    # Nothing to learn: no token, or only one that nothing stands in front of.
    last = learned[np.searchsorted(learned, stops) - 1]
    empty = (first >= stops) | (last <= starts)
    cut = stops - seq_len
    fits = cut <= starts
    can_cut = ~fits & (cut < first) & (documents.too_long == "truncate") & ~empty
    if documents.images is not None:  # a part of an image is none
        can_cut &= documents.images.num_patches == 0
    return np.where(fits & ~empty, starts, np.where(can_cut, cut, -1)), int(can_cut.sum())


def best_fit(lengths: Int[np.ndarray, "X"], size: int) -> list[list[int]]:
    """Items of these lengths in boxes of one size: longest first, each where it leaves least room.

    Args:
      lengths: at most `size` each.
      size: of a box.
    Returns:
      The items of each box.
    """
    boxes: list[list[int]] = []
    rooms: list[int] = []  # rooms that some box has, ascending
    with_room: dict[int, list[int]] = {}
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect.bisect_left(rooms, length)
        if at == len(rooms):
            box, room = len(boxes), size
            boxes.append([])
        else:
            room = rooms[at]
            box = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[at]
        boxes[box].append(item)
        left = room - length
        if left and left not in with_room:
            bisect.insort(rooms, left)
            with_room[left] = []
        if left:
            with_room[left].append(box)
    return boxes


# Items of two sizes that are packed together: every one looks at all boxes of its part.
_PART = 2**14


def fit_both(
    lengths: Int[np.ndarray, "X"], size: int, others: Int[np.ndarray, "X"], limit: int
) -> list[list[int]]:
    """`best_fit` of items that have a second size, of which a box holds `limit`.

    Those with the most of it come first and go where most of it is left, so that boxes share it
    evenly; the others then fill up what room they left.

    Args:
      lengths, others: both sizes of every item, at most `size` and `limit`.
      size, limit: of a box.
    Returns:
      The items of each box.
    """
    if len(lengths) > _PART:
        parts = range(0, len(lengths), _PART)
        return [
            [at + item for item in box]
            for at in parts
            for box in fit_both(lengths[at : at + _PART], size, others[at : at + _PART], limit)
        ]
    count = max(-(-int(lengths.sum()) // size), -(-int(others.sum()) // limit), 1)
    rooms, spaces = np.full(count, size), np.full(count, limit)
    boxes: list[list[int]] = [[] for _ in range(count)]
    by_size = np.lexsort((-lengths, -others))
    for item in by_size.tolist():
        length, other = int(lengths[item]), int(others[item])
        fits = np.flatnonzero((rooms >= length) & (spaces >= other))
        if not len(fits):
            boxes.append([])
            rooms, spaces = np.append(rooms, size), np.append(spaces, limit)
            fits = np.array([len(boxes) - 1])
        best = fits[np.argmax(spaces[fits]) if other else np.argmin(rooms[fits])]
        boxes[best].append(item)
        rooms[best] -= length
        spaces[best] -= other
    return [box for box in boxes if box]
