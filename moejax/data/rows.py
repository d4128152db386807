"""Row n of a training stream, for any n: shuffled epochs of one source, or sources mixed by weight.

A row is a function of its number alone. A position is so one number, and a run that goes on from
it sees the same bits, wherever in an epoch or a document it stopped.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from moejax.config import ConfigError
from moejax.data.packing import Documents, PackedRows, Row, padding_row
from moejax.data.whole_rows import WholeRows

_DOCUMENT_ORDER, _ROW_ORDER = 0, 1
# Rows after which the pattern of a mixture repeats; weights are rounded to one part in so many.
PERIOD = 10_000


class Rows(Protocol):
    """A training stream.

    Attributes:
      rows_per_epoch: rows of a pass; of a mixture, until the first member is through.
      num_rows: rows of the whole stream, None when it is endless.
    """

    rows_per_epoch: int
    num_rows: int | None

    def __getitem__(self, n: int) -> Row:
        """Row `n`; one of padding behind the end."""
        ...


class ShuffledRows:
    """Row n of the training stream of one source, for any n, always the same.

    Epoch e takes the documents in an order drawn from (seed, e), packs them, and takes the rows in
    a second drawn order, so that a batch mixes documents. An endless stream leaves out the last
    row, which is short: each epoch leaves out other tokens. A stream of so many epochs pads it, and
    so holds every token once an epoch.

    Args:
      documents: the training split.
      seq_len: T.
      seed: of both orders; members of a mixture add a number of their own.
      epochs: passes over the documents, 0 for ever.
      name: of the source, for messages.
    Raises:
      ConfigError: the documents do not fill one row.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        seed: int | Sequence[int],
        epochs: int = 0,
        name: str = "",
    ):
        self._documents, self._seq_len = documents, seq_len
        self._seed = (seed,) if isinstance(seed, int) else tuple(seed)
        self._epochs: dict[int, tuple[PackedRows | WholeRows, np.ndarray]] = {}
        self._whole: WholeRows | None = None
        if documents.trained is not None:
            self._pack_whole(epochs, name)
            return
        count = len(documents.tokens)
        if count < seq_len:
            raise ConfigError(
                f"the training split{name and f' of {name}'} has {count} tokens, less than one row "
                f"of data.seq_len={seq_len}. Give more text, or set data.seq_len to at most "
                f"{count}."
            )
        self.rows_per_epoch = -(-count // seq_len) if epochs else count // seq_len
        self.num_rows = epochs * self.rows_per_epoch if epochs else None

    def _pack_whole(self, epochs: int, name: str) -> None:
        """Conversations are packed once; an epoch takes their rows in another order."""
        order = _drawn_order(len(self._documents), self._seed, 0, _DOCUMENT_ORDER)
        self._whole = WholeRows(self._documents, order, self._seq_len)
        self.rows_per_epoch = self._whole.num_rows
        self._whole.check_filled(f"the training split{name and f' of {name}'}")
        self.num_rows = epochs * self.rows_per_epoch if epochs else None
        if self._whole.num_crowded:
            warnings.warn(self._whole.crowded_words, stacklevel=2)
        if self._whole.num_dropped or self._whole.num_truncated:
            warnings.warn(
                f"of {len(self._documents):,} conversations {self._whole.num_dropped:,} are left "
                f"out and {self._whole.num_truncated:,} cut in front: they are longer than "
                f"data.seq_len={self._seq_len} (data.too_long={self._documents.too_long!r})",
                stacklevel=2,
            )

    def __getitem__(self, n: int) -> Row:
        if self.num_rows is not None and n >= self.num_rows:
            return padding_row(self._seq_len, self._documents.eos_id)
        epoch, place = divmod(n, self.rows_per_epoch)
        packed, order = self._epoch(epoch)
        return packed.row(int(order[place]))

    def _epoch(self, epoch: int) -> tuple[PackedRows | WholeRows, np.ndarray]:
        found = self._epochs.get(epoch)
        if found is None:
            rows = _drawn_order(self.rows_per_epoch, self._seed, epoch, _ROW_ORDER)
            found = self._whole or self._packed(epoch), rows
            # Prefetch threads stand in two epochs at most. The table is replaced, never changed:
            # readers need no lock.
            before = {e: old for e, old in self._epochs.items() if e == epoch - 1}
            self._epochs = before | {epoch: found}
        return found

    def _packed(self, epoch: int) -> PackedRows:
        order = _drawn_order(len(self._documents), self._seed, epoch, _DOCUMENT_ORDER)
        return PackedRows(self._documents, order, self._seq_len)


def _drawn_order(count: int, seed: tuple[int, ...], epoch: int, which: int) -> np.ndarray:
    """A permutation of range(count), from raw Philox words, which NumPy never changes."""
    entropy = [seed[0], epoch, which, *seed[1:]]
    words = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(count)
    return np.argsort(words, kind="stable")


class Schedule:
    """Which member gives row n, and how many of its rows came before.

    Every PERIOD rows hold each member in proportion to its weight, spread evenly: row n goes to
    the member that is furthest behind its share.

    Args:
      weights: of the members, any scale; the smallest share is one row of a period.
    """

    def __init__(self, weights: Sequence[float]):
        shares = np.asarray(weights, np.float64) / np.sum(weights) * PERIOD
        counts = np.maximum(np.floor(shares), 1).astype(np.int64)
        # What rounding left over goes to the furthest behind; what tiny shares took too much comes
        # from those that have more than one row.
        while (left := PERIOD - int(counts.sum())) > 0:
            counts[np.argmax(shares - counts)] += 1
        while left < 0:
            counts[np.argmin(np.where(counts > 1, shares - counts, np.inf))] -= 1
            left += 1
        self.counts = counts
        self._member = np.zeros(PERIOD, np.int32)
        self._before = np.zeros(PERIOD, np.int64)
        given = np.zeros(len(counts), np.int64)
        for n in range(PERIOD):
            member = int(np.argmax(counts * (n + 1) - given * PERIOD))
            self._member[n], self._before[n] = member, given[member]
            given[member] += 1

    def __call__(self, n: int) -> tuple[int, int]:
        """(member of row n, number of its rows before)."""
        period, place = divmod(n, PERIOD)
        member = int(self._member[place])
        return member, period * int(self.counts[member]) + int(self._before[place])

    def rows_before(self, n: int) -> list[int]:
        """How many of the first n rows each member gives."""
        period, place = divmod(n, PERIOD)
        part = np.bincount(self._member[:place], minlength=len(self.counts))
        return (period * self.counts + part).tolist()

    def rows_until(self, member: int, count: int) -> int:
        """Rows of the mixture that hold the first `count` of `member`."""
        if count <= 0:
            return 0
        period, rest = divmod(count - 1, int(self.counts[member]))
        return period * PERIOD + int(np.flatnonzero(self._member == member)[rest]) + 1


class MixedRows:
    """Row n of a mixture: members take turns by weight, each with epochs of its own.

    Rows are equally long, so weights are shares of the tokens, whatever the length of documents.

    Args:
      members: name -> rows.
      weights: name -> share.
    """

    def __init__(self, members: dict[str, ShuffledRows], weights: dict[str, float]):
        self._names, self._rows = list(members), list(members.values())
        self.weights = {name: float(weights[name]) for name in self._names}
        self._schedule = Schedule(list(self.weights.values()))
        self.start({})

    def start(self, base: dict[str, int]) -> None:
        """Row 0 of the mixture begins behind these many rows of each member."""
        self.base = {name: int(base.get(name, 0)) for name in self._names}
        self._base = list(self.base.values())
        until = [
            self._schedule.rows_until(k, rows.rows_per_epoch) for k, rows in enumerate(self._rows)
        ]
        self.rows_per_epoch = min(until)
        ends = [
            self._schedule.rows_until(k, rows.num_rows - self._base[k])
            for k, rows in enumerate(self._rows)
            if rows.num_rows is not None
        ]
        self.num_rows = min(ends) if ends else None

    def __getitem__(self, n: int) -> Row:
        member, before = self._schedule(n)
        if self.num_rows is not None and n >= self.num_rows:
            before = self._rows[member].num_rows or 0  # behind the end: padding
            return self._rows[member][before]
        row = self._rows[member][self._base[member] + before]
        if "bad_images" in row:
            row["bad_images"][2] = member
        return row

    def member_rows(self, n: int) -> dict[str, int]:
        """How many rows of each member lie before row n, those before row 0 counted."""
        given = self._schedule.rows_before(n)
        return {
            name: base + count
            for name, base, count in zip(self._names, self._base, given, strict=True)
        }

    def member_rows_per_epoch(self) -> dict[str, int]:
        """Rows of a pass over each member."""
        return {
            name: rows.rows_per_epoch for name, rows in zip(self._names, self._rows, strict=True)
        }
