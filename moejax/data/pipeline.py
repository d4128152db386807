"""Batches: for training endless and resumable to the bit, for evaluation each token once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grain
import numpy as np
from absl import flags

from moejax.config import ConfigError, DataConfig
from moejax.data.packing import Documents, PackedRows, Row, padding_row, tokenize_corpus
from moejax.data.sources import Corpus
from moejax.data.tokenize import Tokenizer

Batch = dict[str, np.ndarray]
Shard = tuple[int, int]

_STATE_FORMAT = 1
# More than any run takes; Grain wants a length.
_ENDLESS = 1 << 40
_DOCUMENT_ORDER, _ROW_ORDER = 0, 1


class ShuffledRows:
    """Row n of an endless training stream, for any n, always the same.

    Epoch e takes the documents in an order drawn from (seed, e), packs them, and takes the rows in
    a second drawn order, so that a batch mixes documents. The last row, short, is left out: each
    epoch leaves out other tokens.

    Args:
      documents: the training split.
      seq_len: T.
      seed: of both orders.
    Raises:
      ConfigError: the documents do not fill one row.
    """

    def __init__(self, documents: Documents, seq_len: int, seed: int):
        self._documents, self._seq_len, self._seed = documents, seq_len, seed
        self.rows_per_epoch = len(documents.tokens) // seq_len
        if not self.rows_per_epoch:
            raise ConfigError(
                f"the training split has {len(documents.tokens)} tokens, less than one row of "
                f"data.seq_len={seq_len}. Give more text, or set data.seq_len to at most "
                f"{len(documents.tokens)}."
            )
        self._epochs: dict[int, tuple[PackedRows, np.ndarray]] = {}

    def __getitem__(self, n: int) -> Row:
        epoch, place = divmod(n, self.rows_per_epoch)
        packed, order = self._epoch(epoch)
        return packed.row(int(order[place]))

    def _epoch(self, epoch: int) -> tuple[PackedRows, np.ndarray]:
        found = self._epochs.get(epoch)
        if found is None:
            documents = _drawn_order(len(self._documents), self._seed, epoch, _DOCUMENT_ORDER)
            rows = _drawn_order(self.rows_per_epoch, self._seed, epoch, _ROW_ORDER)
            found = PackedRows(self._documents, documents, self._seq_len), rows
            # Prefetch threads stand in two epochs at most. The table is replaced, never changed:
            # readers need no lock.
            before = {e: old for e, old in self._epochs.items() if e == epoch - 1}
            self._epochs = before | {epoch: found}
        return found


def _drawn_order(count: int, seed: int, epoch: int, which: int) -> np.ndarray:
    """A permutation of range(count), from raw Philox words, which NumPy never changes."""
    words = np.random.Philox(np.random.SeedSequence([seed, epoch, which])).random_raw(count)
    return np.argsort(words, kind="stable")


def _stack(rows: list[Row]) -> Batch:
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class _BatchAt:
    """This process's rows of global batch `step`; a class, so that it can be sent to workers."""

    def __init__(self, rows: ShuffledRows, first_row: int, batch_size: int, shard: Shard):
        self._rows, self._first_row = rows, first_row
        self._batch_size, self._shard = batch_size, shard

    def __call__(self, step: int) -> Batch:
        index, count = self._shard
        local = self._batch_size // count
        start = self._first_row + step * self._batch_size + index * local
        return _stack([self._rows[n] for n in range(start, start + local)])


class TrainIterator(Iterator[Batch]):
    """Endless batches with a position; made by :func:`make_train_iterator`."""

    def __init__(
        self, cfg: DataConfig, rows: ShuffledRows, identity: Mapping[str, Any], shard: Shard
    ):
        self._cfg, self._rows, self._identity, self._shard = cfg, rows, dict(identity), shard
        self._batches: grain.DatasetIterator | None = None
        self._start(first_row=0)

    def _start(self, first_row: int) -> None:
        """Goes to a row of the stream; workers start at the next batch that is asked for."""
        self.close()
        self._consumed = first_row
        batch_at = _BatchAt(self._rows, first_row, self._cfg.batch_size, self._shard)
        batches = grain.MapDataset.range(_ENDLESS).map(batch_at)
        read = grain.ReadOptions(
            num_threads=min(2, self._cfg.prefetch), prefetch_buffer_size=self._cfg.prefetch
        )
        dataset = batches.to_iter_dataset(read)
        if self._cfg.num_workers:
            # Grain reads absl flags when it starts workers, which fails in a program that never
            # parsed any.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(
                num_workers=self._cfg.num_workers, per_worker_buffer_size=self._cfg.prefetch
            )
            dataset = dataset.mp_prefetch(options)
        self._dataset = dataset

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._dataset)
        batch = next(self._batches)
        self._consumed += self._cfg.batch_size
        if self._cfg.num_workers:
            # What a worker sends lies in shared memory, which must not outlive the iterator.
            batch = {key: np.array(value) for key, value in batch.items()}
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position behind the last batch handed out, whatever was prefetched; for JSON.

        It counts global rows, so it is the same in every process and for every number of processes.
        """
        return {
            "format": _STATE_FORMAT,
            "rows": self._consumed,
            "rows_per_epoch": self._rows.rows_per_epoch,
            "seq_len": self._cfg.seq_len,
            **self._identity,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the position that `state` names.

        With the same text, tokenizer, seq_len and seed the next row is the very next one, whatever
        the batch size. Otherwise the run goes on in the same epoch at the same share of it: rows
        are cut anew then, so up to the end of this epoch some text comes twice and some not at all.

        Raises:
          ConfigError: not a state of this pipeline.
        """
        try:
            known, rows, old = state["format"], int(state["rows"]), int(state["rows_per_epoch"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data position {state!r} is not one: {error} is missing or no number."
            ) from error
        if known != _STATE_FORMAT or rows < 0 or old < 1:
            raise ConfigError(
                f"data position has format {known!r}, rows {rows} of {old}; only format "
                f"{_STATE_FORMAT} is read."
            )
        new = self._rows.rows_per_epoch
        epoch, place = divmod(rows, old)
        self._start(epoch * new + place * new // old)

    @property
    def epoch(self) -> float:
        """Passes over the training split so far."""
        return self._consumed / self._rows.rows_per_epoch

    def close(self) -> None:
        """Ends prefetch threads and worker processes; the iterator may be used again."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None


def make_train_iterator(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    seed: int,
    start_state: Mapping[str, Any] | None = None,
    shard: Shard = (0, 1),
) -> TrainIterator:
    """Endless training batches of packed rows.

    Args:
      cfg: `seq_len`, `batch_size` (rows of the global batch), `num_workers` (processes, 0 = none)
        and `prefetch` (batches made ahead, in each worker) are read.
      tokenizer: its ids stand in the rows.
      corpus: the training split.
      seed: of the order of documents and rows.
      start_state: what `get_state` gave; None starts at the beginning.
      shard: (index, count): this process yields the index-th of `count` equal parts of every global
        batch's rows.
    Returns:
      An iterator of dicts of int32 arrays [batch_size / count, seq_len] (see `PackedRows.row`),
      with `get_state`, `set_state`, `epoch` and `close`.
    Raises:
      ConfigError: the text does not fill a row, or the batch does not divide over the processes.
    """
    index, count = shard
    if not 0 <= index < count or cfg.batch_size % count:
        raise ConfigError(
            f"data.batch_size={cfg.batch_size} does not divide over {count} processes "
            f"(this is process {index}). Use a multiple of {count}."
        )
    rows = ShuffledRows(tokenize_corpus(tokenizer, corpus), cfg.seq_len, seed)
    identity = {"seed": seed, "corpus_sha256": corpus.sha256, "tokenizer_sha256": tokenizer.sha256}
    iterator = TrainIterator(cfg, rows, identity, shard)
    if start_state is not None:
        iterator.set_state(start_state)
    return iterator


class EvalBatches:
    """A whole split in fixed order, to be iterated as often as wanted.

    Attributes:
      num_bytes: bytes of the split's texts.
      num_tokens: its tokens, every document's eos counted.
      num_labels: positions that have a label; a row's first token and a document's first have none.
      bytes_per_token: num_bytes / num_tokens.
    """

    def __init__(
        self, documents: Documents, seq_len: int, batch_size: int, num_bytes: int, shard: Shard
    ):
        self._rows = PackedRows(documents, np.arange(len(documents)), seq_len)
        self._padding = padding_row(seq_len, documents.eos_id)
        self._batch_size, self._shard = batch_size, shard
        self.num_bytes, self.num_tokens = num_bytes, self._rows.num_tokens
        self.bytes_per_token = num_bytes / self.num_tokens
        # A segment loses one label, its last: as many segments as there are borders of documents or
        # of rows.
        borders = np.union1d(documents.starts[:-1], np.arange(0, self.num_tokens, seq_len))
        self.num_labels = self.num_tokens - len(borders)

    def __len__(self) -> int:
        return -(-self._rows.num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        index, count = self._shard
        local = self._batch_size // count
        for step in range(len(self)):
            start = step * self._batch_size + index * local
            yield _stack([self._row(n) for n in range(start, start + local)])

    def _row(self, n: int) -> Row:
        return self._rows.row(n) if n < self._rows.num_rows else self._padding

    def nats_per_byte(self, nats_per_token: float) -> float:
        """Mean loss a label -> a byte: nats_per_token / bytes_per_token.

        The unlabelled tokens are so charged the mean, and eos counts as a token that holds no byte.
        """
        return nats_per_token / self.bytes_per_token


def make_eval_batches(
    cfg: DataConfig, tokenizer: Tokenizer, corpus: Corpus, batch_size: int, *, shard: Shard = (0, 1)
) -> EvalBatches:
    """Batches [batch_size / count, seq_len] over all of `corpus`, each token once.

    Documents keep the corpus' order. The last row is padded in front and the last batch filled with
    rows of padding (segment 0, labels -100), so every batch has one shape.

    Raises:
      ConfigError: `batch_size` does not divide over the processes of `shard`.
    """
    if batch_size % shard[1]:
        raise ConfigError(
            f"eval.batch_size={batch_size} does not divide over {shard[1]} processes."
        )
    documents = tokenize_corpus(tokenizer, corpus)
    return EvalBatches(documents, cfg.seq_len, batch_size, corpus.num_bytes, shard)
