"""Losses of documents, each scored alone, and what they amount to a token and a byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moejax.config import ConfigError
from moejax.data import Corpus, Tokenizer, tokenize_corpus
from moejax.generate.scoring import OnProgress, ScoredRow, Scorer, windows


class DocumentLoss(NamedTuple):
    """One document and its loss.

    Attributes:
      name: as the corpus calls it.
      tokens: its tokens, end of text counted; without a begin token.
      scored: how many of them something precedes, so that they have a loss.
      bytes: of its text in UTF-8; None where the corpus holds tokens only.
      loss: nats, summed over the scored tokens.
    """

    name: str
    tokens: int
    scored: int
    bytes: int | None
    loss: float

    def as_json(self) -> dict[str, Any]:
        """The fields, with nats a byte."""
        found = rates(self.loss, self.scored, self.tokens, self.bytes)
        return self._asdict() | {"nats_per_byte": found["nats_per_byte"]}


def score_documents(
    scorer: Scorer,
    tokenizer: Tokenizer,
    corpus: Corpus,
    *,
    stride: int = 0,
    on_progress: OnProgress | None = None,
) -> list[DocumentLoss]:
    """The loss of every document by itself, in the corpus' order.

    A document is its tokens and eos, as in training, with the begin token in front if the
    tokenizer has one; without one its first token has no loss. One longer than the scorer's
    `max_length` is cut by :func:`windows`.

    Args:
      scorer: the model, batch and window.
      tokenizer: its tokens.
      corpus: the documents.
      stride: tokens that a window moves on; 0 is a whole window.
      on_progress: called with windows done and windows in all.
    Raises:
      ConfigError: the documents are conversations.
    """
    if any(part.chat is not None for part in corpus.parts or (corpus,)):
        raise ConfigError(
            "conversations (data.source='chat') are evaluated in rows, where what is learned "
            "counts: leave out --alone and --per-document, and name a run or a step."
        )
    documents = tokenize_corpus(tokenizer, corpus)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    rows: list[ScoredRow] = []
    owners: list[int] = []
    for number in range(len(documents)):
        tokens = documents.tokens[documents.starts[number] : documents.starts[number + 1]]
        row = np.concatenate([np.asarray(begin, np.int32), tokens]).astype(np.int32)
        own = windows(row, scorer.max_length, stride)
        rows += own
        owners += [number] * len(own)
    losses, scored = np.zeros(len(documents)), np.zeros(len(documents), np.int64)
    for number, scores in zip(owners, scorer(rows, on_progress), strict=True):
        losses[number] += scores.loss
        scored[number] += len(scores.losses)
    return [
        DocumentLoss(corpus.names[n], int(documents.lengths[n]), int(scored[n]), size, losses[n])
        for n, size in enumerate(_sizes(corpus, len(documents)))
    ]


def _sizes(corpus: Corpus, count: int) -> Iterator[int | None]:
    parts = corpus.parts or (corpus,)
    for part in parts:
        if part.cache is not None:
            yield from [None] * len(part)
        else:
            yield from (len(text.encode()) for text in part.texts)


def totals(documents: Sequence[DocumentLoss], num_bytes: int) -> dict[str, Any]:
    """Loss, perplexity, nats and bits a byte, tokens, bytes and documents of all together."""
    loss = math.fsum(document.loss for document in documents)
    scored = sum(document.scored for document in documents)
    tokens = sum(document.tokens for document in documents)
    return rates(loss, scored, tokens, num_bytes) | {
        "num_tokens": scored, "num_bytes": num_bytes, "documents": len(documents),
    }  # fmt: skip


def rates(loss: float, scored: int, tokens: int, num_bytes: int | None) -> dict[str, Any]:
    """A summed loss a token and a byte; tokens without a loss are charged the mean, as in training.

    Args:
      loss: nats over the scored tokens.
      scored, tokens: how many have a loss, and how many there are.
      num_bytes: of their text; None where that is not known.
    """
    mean = loss / scored if scored else float("nan")
    per_byte = mean * tokens / num_bytes if num_bytes else None
    return {
        "loss": mean,
        "perplexity": perplexity(mean),
        "nats_per_byte": per_byte,
        "bits_per_byte": None if per_byte is None else per_byte / math.log(2),
    }


def perplexity(nats: float) -> float:
    """exp of a loss; infinity where that is no number any more."""
    return math.exp(nats) if not nats > 709 else math.inf
