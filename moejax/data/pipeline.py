"""Training batches: through Grain with prefetch, resumable to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags

from moejax.config import ConfigError, DataConfig, VisionConfig
from moejax.data.corpus import Corpus, split_hash
from moejax.data.evaluation import Batch, Shard, stack
from moejax.data.image_rows import ImageRoom
from moejax.data.image_texts import ImageRules, complete
from moejax.data.packing import tokenize_corpus
from moejax.data.rows import MixedRows, Rows, ShuffledRows
from moejax.data.tokenize import Tokenizer

_STATE_FORMAT = 1
# More than any run takes; Grain wants a length.
_ENDLESS = 1 << 40


class _BatchAt:
    """This process's rows of global batch `step`; a class, so that it can be sent to workers."""

    def __init__(
        self, rows: Rows, first_row: int, batch_size: int, own: Sequence[int],
        room: ImageRoom | None,
    ):  # fmt: skip
        self._rows, self._first_row, self._room = rows, first_row, room
        self._batch_size, self._own = batch_size, own

    def __call__(self, step: int) -> Batch:
        start = self._first_row + step * self._batch_size
        return stack([complete(self._rows[start + n], self._room) for n in self._own])


class TrainIterator(Iterator[Batch]):
    """Batches with a position; made by :func:`make_train_iterator`."""

    def __init__(
        self, cfg: DataConfig, rows: Rows, identity: Mapping[str, Any], own: Sequence[int],
        room: ImageRoom | None = None, bad_images: int = 0,
    ):  # fmt: skip
        self._cfg, self._rows, self._identity, self._own = cfg, rows, dict(identity), own
        self._room, self._left_out = room, bad_images
        # Of rows as they are packed, by member and first document: a row comes again every epoch.
        self._damaged: dict[tuple[int, int], int] = {}
        self._batches: grain.DatasetIterator | None = None
        self._consumed = 0

    @property
    def bad_images(self) -> int | None:
        """Samples of which nothing is learned because of an image, each counted once: those left
        out when the data was read, and those this process found in the rows up to its position, of
        a resumed run from its beginning. None where rows have no images.
        """
        return None if self._room is None else self._left_out + sum(self._damaged.values())

    def _start(self, first_row: int) -> None:
        """Goes to a row of the stream; workers start at the next batch that is asked for."""
        self.close()
        self._consumed = first_row

    def _open(self) -> grain.DatasetIterator:
        """The batches from here on, with their threads and workers."""
        batch_at = _BatchAt(self._rows, self._consumed, self._cfg.batch_size, self._own, self._room)
        left = self.batches_left
        batches = grain.MapDataset.range(_ENDLESS if left is None else left).map(batch_at)
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
        return iter(dataset)

    @property
    def batches_left(self) -> int | None:
        """Batches until the data is used up, the last filled with padding; None = endless."""
        if self._rows.num_rows is None:
            return None
        return max(0, -(-(self._rows.num_rows - self._consumed) // self._cfg.batch_size))

    def last_step(self, done: int, wanted: int) -> int:
        """The last step of a run that has taken `done` of `wanted` steps: the data may end it."""
        left = self.batches_left
        return wanted if left is None else min(wanted, done + left)

    def __next__(self) -> Batch:
        if self.batches_left == 0:
            raise StopIteration
        if self._batches is None:
            self._batches = self._open()
        batch = next(self._batches)
        self._consumed += self._cfg.batch_size
        if self._cfg.num_workers:
            # What a worker sends lies in shared memory, which must not outlive the iterator.
            batch = {key: np.array(value) for key, value in batch.items()}
        if self._room is not None:
            for count, document, member in batch.pop("bad_images").tolist():
                if count:
                    self._damaged[member, document] = count
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position behind the last batch handed out, whatever was prefetched; for JSON.

        It counts global rows, so it is the same in every process and for every number of processes;
        only `bad_images` is what this process found.
        """
        state = {
            "format": _STATE_FORMAT,
            "rows": self._consumed,
            "rows_per_epoch": self._rows.rows_per_epoch,
            "seq_len": self._cfg.seq_len,
            **self._identity,
        }
        if isinstance(self._rows, MixedRows):
            state["mixture"] = {
                "weights": _weights(self._rows),
                "base": self._rows.base,
                "member_rows": self._rows.member_rows(self._consumed),
                "member_rows_per_epoch": self._rows.member_rows_per_epoch(),
            }
        if self._room is not None:
            found = [[*row, count] for row, count in self._damaged.items()]
            state["bad_images"] = {"count": self.bad_images, "damaged": found}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on behind the position that `state` names.

        With the same text, tokenizer, seq_len and seed the next row is the very next one, whatever
        the batch size. Otherwise the run goes on in the same epoch at the same share of it: rows
        are cut anew then, so up to the end of this epoch some text comes twice and some not at all.
        When the weights or the members of a mixture changed, each member goes on where it stood,
        and new ones begin.

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
        self._damaged = self._known_damaged(state)
        if isinstance(self._rows, MixedRows):
            self._start(_mixture_start(self._rows, rows, state.get("mixture")))
            return
        # A mixture counts its epochs otherwise: a single source that follows one begins anew.
        self._start(0 if "mixture" in state else _same_share(rows, old, self._rows.rows_per_epoch))

    def _known_damaged(self, state: Mapping[str, Any]) -> dict[tuple[int, int], int]:
        """The rows with bad images that a state names; none where rows were packed otherwise."""
        now = {"seq_len": self._cfg.seq_len, **self._identity}
        if self._room is None or any(state.get(key) != value for key, value in now.items()):
            return {}
        try:
            found = state.get("bad_images", {}).get("damaged", [])
            return {(int(member), int(document)): int(n) for member, document, n in found}
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(
                f"data position has bad_images={state['bad_images']!r}, which is not one ({error})."
            ) from error

    @property
    def epoch(self) -> float:
        """Passes over the training split so far; of a mixture, by the first member through."""
        return self._consumed / self._rows.rows_per_epoch

    def close(self) -> None:
        """Ends prefetch threads and worker processes; the next batch starts them again."""
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
    own: Sequence[int] | None = None,
    vision: VisionConfig | None = None,
) -> TrainIterator:
    """Training batches of packed rows: endless, or so many epochs.

    Args:
      cfg: `seq_len`, `batch_size` (rows of the global batch), `epochs`, `shuffle_seed`, `mixture`,
        `num_workers` (processes, 0 = none) and `prefetch` (batches made ahead, in each worker) are
        read.
      tokenizer: its ids stand in the rows.
      corpus: the training split.
      seed: of the order of documents and rows, where `cfg.shuffle_seed` is -1.
      start_state: what `get_state` gave; None starts at the beginning.
      shard: (index, count): this process yields the index-th of `count` equal parts of every global
        batch's rows.
      own: instead of `shard`, the numbers of the rows of every global batch that this process
        yields, in this order.
      vision: section of the tower, where `cfg.image_patches` gives rows room for images.
    Returns:
      An iterator of dicts of int32 arrays [batch_size / count, seq_len] (see `PackedRows.row`) and
      what `ImageRoom.shapes` lists, with `get_state`, `set_state`, `epoch`, `batches_left` and
      `close`.
    Raises:
      ConfigError: the text does not fill a row, or the batch does not divide over the processes.
    """
    index, count = shard
    if not 0 <= index < count or cfg.batch_size % count:
        raise ConfigError(
            f"data.batch_size={cfg.batch_size} does not divide over {count} processes "
            f"(this is process {index}). Use a multiple of {count}."
        )
    local = cfg.batch_size // count
    own = range(index * local, (index + 1) * local) if own is None else own
    seed = seed if cfg.shuffle_seed < 0 else cfg.shuffle_seed
    images = ImageRules.of(cfg, vision, tokenizer)
    rows: Rows
    if cfg.mixture:
        rows, bad = _mixed_rows(cfg, tokenizer, corpus, seed, images)
    else:
        documents = tokenize_corpus(tokenizer, corpus, images)
        rows, bad = ShuffledRows(documents, cfg.seq_len, seed, cfg.epochs), documents.num_bad
    identity = {"seed": seed, "corpus_sha256": corpus.sha256, "tokenizer_sha256": tokenizer.sha256}
    room = None if images is None else images.room
    iterator = TrainIterator(cfg, rows, identity, own, room, bad)
    if start_state is not None:
        iterator.set_state(start_state)
    return iterator


def _mixed_rows(
    cfg: DataConfig, tokenizer: Tokenizer, corpus: Corpus, seed: int, images: ImageRules | None
) -> tuple[MixedRows, int]:
    """The members of `cfg.mixture`, whose documents are the parts of `corpus`.

    And how many documents are left out because of an image.
    """
    members, bad = {}, 0
    for member, part in zip(cfg.mixture, corpus.parts, strict=True):
        # By its name a member keeps its order when others join or leave.
        own = int(split_hash(member.name) / 100 * 2**32)
        documents = tokenize_corpus(tokenizer, part, images)
        bad += documents.num_bad
        members[member.name] = ShuffledRows(
            documents, cfg.seq_len, (seed, own), cfg.epochs, member.name
        )
    return MixedRows(members, {member.name: member.weight for member in cfg.mixture}), bad


def _weights(rows: MixedRows) -> list[list[Any]]:
    """[name, weight] of each member, as JSON gives it back; the order decides whose turn it is."""
    return [[name, weight] for name, weight in rows.weights.items()]


def _same_share(rows: int, old: int, new: int) -> int:
    """Row of the same share of the same epoch, when an epoch has `new` rows instead of `old`."""
    epoch, place = divmod(rows, old)
    return epoch * new + place * new // old


def _mixture_start(rows: MixedRows, consumed: int, saved: Any) -> int:
    """Puts the members of `rows` where a saved position left them. Returns the row to go on at."""
    if saved is None:  # the run had a single source
        rows.start({})
        return 0
    per_epoch = rows.member_rows_per_epoch()
    try:
        before = {name: int(count) for name, count in saved["member_rows_per_epoch"].items()}
        if saved["weights"] == _weights(rows) and before == per_epoch:
            rows.start(saved["base"])
            return consumed
        stood = {name: int(count) for name, count in saved["member_rows"].items()}
        rows.start(
            {
                name: _same_share(stood[name], before[name], count)
                for name, count in per_epoch.items()
                if name in stood
            }
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"data position {saved!r} is none of a mixture ({error}).") from error
    return 0
