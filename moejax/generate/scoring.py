"""Log-likelihoods of many token rows of many lengths, with few programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moejax.config import ConfigError
from moejax.generate.engine import power_of_two
from moejax.generate.model import IGNORED, LanguageModel
from moejax.partitioning import num_batch_shards

OnProgress = Callable[[int, int], None]
_SHORTEST = 32


class ScoredRow(NamedTuple):
    """A row of tokens, and which of them are scored.

    Attributes:
      tokens: int32 [T].
      first: the first token that is scored, at least 1; those before it are context only.
    """

    tokens: np.ndarray
    first: int = 1


class Scores(NamedTuple):
    """What a model says of the scored tokens of a row.

    Attributes:
      losses: float32, nats of each.
      greedy: bool, whether each is the most likely one.
    """

    losses: np.ndarray
    greedy: np.ndarray

    @property
    def loss(self) -> float:
        """Their sum."""
        return float(self.losses.sum(dtype=np.float64))


class Scorer:
    """Scores rows in batches of one size and lengths of a few: one program a length.

    A row's length is rounded up to a power of two (or to `max_length`) from itself alone, so its
    numbers depend neither on the batch nor on the other rows.

    Attributes:
      lengths: those that were used so far.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int = 8, max_length: int = 2048):
        """
        Args:
          model: whose numbers these are.
          batch_size: rows that run at once, rounded up to what the devices share evenly.
          max_length: most tokens that a row may feed to the model.
        Raises:
          ConfigError: one of them is below 1.
        """
        for name, value in (("batch_size", batch_size), ("max_length", max_length)):
            if value < 1:
                raise ConfigError(f"{name}={value} is not allowed: 1 or more.")
        self.model, self.max_length = model, max_length
        ways = num_batch_shards(dict(model.mesh.shape))
        self.batch_size = -(-batch_size // ways) * ways
        self.lengths: set[int] = set()

    def __call__(
        self, rows: Sequence[ScoredRow], on_progress: OnProgress | None = None
    ) -> list[Scores]:
        """Scores of every row, in their order.

        Args:
          rows: what is scored; the last token of a row is not fed.
          on_progress: called with rows done and rows in all, after each batch.
        Raises:
          ConfigError: a row is too long, or asks for its token 0, which nothing precedes.
        """
        for number, row in enumerate(rows):
            if row.first < 1 or len(row.tokens) - 1 > self.max_length:
                raise ConfigError(
                    f"row {number} has {len(row.tokens)} tokens, scored from token {row.first}; at "
                    f"most {self.max_length + 1} fit, and token 0 has nothing before it."
                )
        out: list[Scores | None] = [None] * len(rows)
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_length.setdefault(self._length(row), []).append(number)
        done = 0
        for length in sorted(by_length, reverse=True):  # the largest first: memory shows at once
            for start in range(0, len(by_length[length]), self.batch_size):
                numbers = by_length[length][start : start + self.batch_size]
                found = self._batch([rows[n] for n in numbers], length)
                for number, scores in zip(numbers, found, strict=True):
                    out[number] = scores
                done += len(numbers)
                if on_progress is not None:
                    on_progress(done, len(rows))
        return [scores for scores in out if scores is not None]

    def _length(self, row: ScoredRow) -> int:
        fed = len(row.tokens) - 1
        return min(power_of_two(fed, _SHORTEST), max(self.max_length, fed))

    def _batch(self, rows: Sequence[ScoredRow], length: int) -> list[Scores]:
        """Each row at the right end of [batch_size, length]; rows that are missing hold nothing."""
        self.lengths.add(length)
        shape = (self.batch_size, length)
        tokens_BT, segments_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        labels_BT = np.full(shape, IGNORED, np.int32)
        counts = [max(len(row.tokens) - row.first, 0) for row in rows]
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            start = length - (len(row.tokens) - 1)
            tokens_BT[place, start:], segments_BT[place, start:] = row.tokens[:-1], 1
            labels_BT[place, length - count :] = row.tokens[len(row.tokens) - count :]
        found = self.model.token_scores(tokens_BT, labels_BT, segments_BT, aligned=True)
        return [
            Scores(found.losses[place, length - count :], found.greedy[place, length - count :])
            for place, count in enumerate(counts)
        ]


def windows(tokens: np.ndarray, max_length: int, stride: int = 0) -> list[ScoredRow]:
    """A document as rows that together score each of its tokens but the first, once.

    A window feeds `max_length` tokens and begins `stride` tokens after the one before it; nothing
    is carried over. The last one is moved back to be full, and scores what is left.

    Args:
      tokens: int32, the whole document.
      max_length: most tokens that a window feeds.
      stride: 1 to max_length; 0 is max_length, windows that feed no token twice.
    Raises:
      ConfigError: a stride out of its range.
    """
    stride = stride or max_length
    if not 1 <= stride <= max_length:
        raise ConfigError(f"stride={stride} is not allowed: 1 to {max_length}, a window's tokens.")
    tokens = np.asarray(tokens, np.int32)
    rows, scored, start = [], 1, 0
    while scored < len(tokens):
        start = max(min(start, len(tokens) - 1 - max_length), 0)
        end = min(start + max_length + 1, len(tokens))
        rows.append(ScoredRow(tokens[start:end], scored - start))
        scored, start = end, start + stride
    return rows
