"""Evaluation: every token of a split once, in fixed order; several sets by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from moejax.config import ConfigError, DataConfig, RunConfig, VisionConfig
from moejax.data.corpus import Corpus
from moejax.data.image_rows import ImageRoom
from moejax.data.image_texts import ImageRules, complete
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
      num_left_out: documents that no row has: because of an image, or too long.
      num_bad_images: those of them with a bad image.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Documents, int]],
        seq_len: int,
        batch_size: int,
        shard: Shard,
        document_ids: bool = False,
        max_rows: int = 0,
        room: ImageRoom | None = None,
    ):
        """
        Args:
          parts: documents, and bytes of their texts.
        """
        self._rows = _PartRows(parts, seq_len)
        self._padding = padding_row(seq_len, parts[0][0].eos_id)
        self._batch_size, self._shard, self._room = batch_size, shard, room
        self._with_ids = document_ids
        self._num_rows = min(max_rows or self._rows.num_rows, self._rows.num_rows)
        if document_ids:
            self._padding["document_ids"] = np.full(seq_len, -1, np.int32)
        self.num_tokens, self.num_labels = self._rows.num_tokens, self._rows.num_labels
        self.num_bytes, self.num_left_out = self._rows.num_bytes, self._rows.num_left_out
        self.num_bad_images = sum(documents.num_bad for documents, _ in parts)
        self._damaged: dict[int, int] = {}  # by row: each counts once, however often it is read
        self.bytes_per_token = self.num_bytes / self._rows.num_counted

    def __len__(self) -> int:
        return -(-self._num_rows // self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        index, count = self._shard
        local = self._batch_size // count
        for step in range(len(self)):
            start = step * self._batch_size + index * local
            rows = [complete(self._row(n), self._room) for n in range(start, start + local)]
            batch = stack(rows)
            for n, (count, _, _) in enumerate(batch.pop("bad_images", np.zeros((0, 3))), start):
                self._damaged[n] = int(count)
            yield batch

    @property
    def num_damaged(self) -> int:
        """Documents in rows of which nothing counts because of an image, of those that this process
        has read; `num_bytes` and `num_labels`, which are known before that, have them.
        """
        return sum(self._damaged.values())

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
    vision: VisionConfig | None = None,
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
      vision: section of the tower, where `cfg.image_patches` gives rows room for images.
    Raises:
      ConfigError: `batch_size` does not divide over the processes of `shard`.
    """
    if batch_size % shard[1]:
        raise ConfigError(
            f"eval.batch_size={batch_size} does not divide over {shard[1]} processes."
        )
    images = ImageRules.of(cfg, vision, tokenizer)
    apart = any(part.chat is not None for part in corpus.parts)  # packed otherwise than texts
    parts = [
        (tokenize_corpus(tokenizer, part, images), part.num_bytes)
        for part in (corpus.parts if apart else (corpus,))
    ]
    room = None if images is None else images.room
    return EvalBatches(parts, cfg.seq_len, batch_size, shard, document_ids, max_rows, room)


class _PartRows:
    """The rows of several packings, one behind the other, and their sums."""

    def __init__(self, parts: Sequence[tuple[Documents, int]], seq_len: int):
        self._packed = [pack(d, np.arange(len(d)), seq_len) for d, _ in parts]
        self._first_document = np.cumsum([0, *(len(documents) for documents, _ in parts)])
        self._ends = np.cumsum([packed.num_rows for packed in self._packed])
        self.num_rows = int(self._ends[-1])
        self.num_tokens = sum(packed.num_tokens for packed in self._packed)
        self.num_labels = sum(packed.num_labels for packed in self._packed)
        self.num_bytes = self.num_counted = self.num_left_out = 0
        for packed, (_, num_bytes) in zip(self._packed, parts, strict=True):
            if isinstance(packed, WholeRows):
                packed.check_filled("the held-out data")
                self.num_bytes += packed.num_bytes
                self.num_left_out += packed.num_left_out
                self.num_counted += packed.num_labels
            else:
                self.num_bytes += num_bytes
                self.num_counted += packed.num_tokens

    def _place(self, n: int) -> tuple[int, int]:
        part = int(np.searchsorted(self._ends, n, side="right"))
        return part, n - (int(self._ends[part - 1]) if part else 0)

    def row(self, n: int) -> Row:
        part, own = self._place(n)
        return self._packed[part].row(own)

    def document_ids(self, n: int) -> np.ndarray:
        part, own = self._place(n)
        ids = self._packed[part].document_ids(own)
        return np.where(ids >= 0, ids + self._first_document[part], ids).astype(np.int32)


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
            sets[one.name] = make_eval_batches(
                cfg.data, tokenizer, corpus, rows, shard=shard, vision=cfg.model.vision
            )
        except ConfigError as error:
            raise ConfigError(f"evaluation set {one.name}: {error}") from error
    return sets
