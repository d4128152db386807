"""Evaluation: every token of a split once, in fixed order; several sets by name."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moejax.config import ConfigError, DataConfig, RunConfig
from moejax.data.corpus import Corpus
from moejax.data.packing import Documents, Row, pack, padding_row, tokenize_corpus
from moejax.data.sources import load_corpus
from moejax.data.tokenize import Tokenizer
from moejax.data.whole_rows import WholeRows

Batch = dict[str, np.ndarray]
Shard = tuple[int, int]


def stack(rows: list[Row]) -> Batch:
    """Rows [T] as a batch [rows, T]."""
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class EvalBatches:
    """A whole split in fixed order, to be iterated as often as wanted.

    Attributes:
      num_bytes: bytes of the split's texts; of conversations, of what is learned.
      num_tokens: its tokens, every document's eos counted.
      num_labels: positions that have a label; a row's first token and a document's first have none.
      bytes_per_token: num_bytes / num_tokens; of conversations, / num_labels.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        batch_size: int,
        num_bytes: int,
        shard: Shard,
        document_ids: bool = False,
        max_rows: int = 0,
    ):
        self._rows = pack(documents, np.arange(len(documents)), seq_len)
        self._padding = padding_row(seq_len, documents.eos_id)
        self._batch_size, self._shard = batch_size, shard
        self._with_ids = document_ids
        self._num_rows = min(max_rows or self._rows.num_rows, self._rows.num_rows)
        if document_ids:
            self._padding["document_ids"] = np.full(seq_len, -1, np.int32)
        self.num_tokens, self.num_labels = self._rows.num_tokens, self._rows.num_labels
        self.num_bytes, counted = num_bytes, self.num_tokens
        if isinstance(self._rows, WholeRows):
            self._rows.check_filled("the held-out data")
            self.num_bytes, counted = self._rows.num_bytes, self.num_labels
        self.bytes_per_token = self.num_bytes / counted

    def __len__(self) -> int:
        return -(-self._num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        index, count = self._shard
        local = self._batch_size // count
        for step in range(len(self)):
            start = step * self._batch_size + index * local
            yield stack([self._row(n) for n in range(start, start + local)])

    def _row(self, n: int) -> Row:
        if n >= self._num_rows:
            return self._padding
        row = self._rows.row(n)
        if self._with_ids:
            row["document_ids"] = self._rows.document_ids(n)
        return row

    def nats_per_byte(self, nats_per_token: float) -> float:
        """Mean loss a label -> a byte: nats_per_token / bytes_per_token.

        The unlabelled tokens are so charged the mean, and eos counts as a token that holds no byte.
        """
        return nats_per_token / self.bytes_per_token


def make_eval_batches(
    cfg: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    batch_size: int,
    *,
    shard: Shard = (0, 1),
    document_ids: bool = False,
    max_rows: int = 0,
) -> EvalBatches:
    """Batches [batch_size / count, seq_len] over all of `corpus`, each token once.

    Documents keep the corpus' order. The last row is padded in front and the last batch filled with
    rows of padding (segment 0, labels -100), so every batch has one shape.

    Args:
      cfg: `seq_len` is read.
      tokenizer: its ids stand in the rows.
      corpus: the documents.
      batch_size: rows of a batch, over all processes.
      shard: (index, count): this process yields the index-th of `count` equal parts.
      document_ids: adds int32 `document_ids` to a batch: which document of the corpus
        (`corpus.names[i]`) a token is of, -1 for padding.
      max_rows: only the first so many rows, over all processes, whatever the batch; 0 = all.
    Raises:
      ConfigError: `batch_size` does not divide over the processes of `shard`.
    """
    if batch_size % shard[1]:
        raise ConfigError(
            f"eval.batch_size={batch_size} does not divide over {shard[1]} processes."
        )
    documents = tokenize_corpus(tokenizer, corpus)
    return EvalBatches(
        documents, cfg.seq_len, batch_size, corpus.num_bytes, shard, document_ids, max_rows
    )


def make_eval_sets(
    cfg: RunConfig, tokenizer: Tokenizer, *, shard: Shard = (0, 1)
) -> dict[str, EvalBatches]:
    """The sets that `cfg.eval.sets` names, each as `make_eval_batches` gives it.

    Args:
      cfg: `eval.sets`, `eval.batch_size` (0 = `data.batch_size`) and `data.seq_len` are read.
      tokenizer: its ids stand in the rows.
      shard: (index, count) of this process.
    Returns:
      Name -> batches, in the order of the config.
    Raises:
      ConfigError: a set cannot be read or is empty; the message begins with its name.
    """
    sets = {}
    for one in cfg.eval.sets:
        try:
            corpus = load_corpus(one, one.split)
            rows = cfg.eval.batch_size or cfg.data.batch_size
            sets[one.name] = make_eval_batches(cfg.data, tokenizer, corpus, rows, shard=shard)
        except ConfigError as error:
            raise ConfigError(f"evaluation set {one.name}: {error}") from error
    return sets
