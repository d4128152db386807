"""What preparing data tells: how far it is, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# Told after each chunk of documents or shard: bytes done, bytes of all (estimated).
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Report:
    """What a cache holds.

    Attributes:
      name: of the source.
      folder: where the cache is.
      documents, tokens, bytes: of both splits; eos counts as a token.
      splits: the same by split.
      reused: shards that were there already.
    """

    name: str
    folder: str
    documents: int
    tokens: int
    bytes: int
    splits: dict[str, dict[str, int]]
    reused: int

    @property
    def tokens_per_byte(self) -> float:
        """tokens / bytes."""
        return self.tokens / max(self.bytes, 1)

    def as_json(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return dataclasses.asdict(self) | {"tokens_per_byte": self.tokens_per_byte}


class Totals:
    """Bytes done and to do, over all sources, as the progress bar wants them."""

    def __init__(self, progress: Progress):
        self._progress, self._done, self._total = progress, 0.0, 0.0

    def expect(self, num_bytes: float) -> None:
        self._total += num_bytes

    def add(self, num_bytes: float) -> None:
        self._done += num_bytes
        self._total = max(self._total, self._done)
        self._progress(int(self._done), int(self._total))
