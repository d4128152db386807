"""What a run on conversations is about to learn: counts, and one example as the model sees it."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np

from moejax.config import DataConfig, VisionConfig
from moejax.data.chat import ChatEncoder
from moejax.data.corpus import Corpus
from moejax.data.image_texts import ImageRules
from moejax.data.packing import tokenize_corpus
from moejax.data.whole_rows import WholeRows


@dataclasses.dataclass(frozen=True)
class ChatFacts:
    """Counts of the training split.

    Attributes:
      examples: conversations, those that are left out counted.
      rendering: how they become text.
      tokens, learned: tokens in rows, and those of them that have a label.
      rows: of an epoch.
      fill: share of the rows that is no padding.
      dropped, truncated: conversations that were longer than a row.
      example: name of the first conversation in the rows.
      parts: its text as (text, whether it is learned), special tokens by name.
      bad_images: conversations left out because of an image, as far as the heads of files tell.
      crowded: what is to be said of those whose images have no room in a row, if there are any.
    """

    examples: int
    rendering: str
    tokens: int
    learned: int
    rows: int
    fill: float
    dropped: int
    truncated: int
    example: str
    parts: list[tuple[str, bool]]
    bad_images: int = 0
    crowded: str = ""

    def lines(self) -> list[str]:
        """The facts, a line each; what is learned of the example stands in `>>> <<<`."""
        left_out = f"{self.bad_images:,} of them left out for bad images, " * bool(self.bad_images)
        told = [
            f"conversations: {self.examples:,}, {left_out}{self.rendering}",
            f"tokens: {self.tokens:,} in {self.rows:,} rows, {self.fill:.1%} full; "
            f"{self.learned:,} are learned ({self.learned / max(self.tokens, 1):.1%})",
        ]
        if self.dropped or self.truncated:
            told.append(
                f"longer than a row: {self.dropped:,} left out, {self.truncated:,} cut in front"
            )
        if self.crowded:
            told.append(f"{self.crowded}.")
        shown = "".join(f">>>{text}<<<" if learned else text for text, learned in self.parts)
        return [*told, f"example, learned what stands in >>> <<< ({self.example}):", shown, ""]


def chat_facts(
    cfg: DataConfig, tokenizer: Any, corpus: Corpus, vision: VisionConfig | None = None
) -> ChatFacts:
    """Packs the training split as a run does and says what is in it.

    Args:
      cfg: `seq_len` is read.
      tokenizer: of the run.
      corpus: the training split of a source "chat" or "webdataset".
      vision: section of the tower, where rows have room for images.
    Raises:
      ConfigError: a record cannot be rendered, or none fits a row.
    """
    assert corpus.chat is not None
    documents = tokenize_corpus(tokenizer, corpus, ImageRules.of(cfg, vision, tokenizer))
    rows = WholeRows(documents, np.arange(len(documents)), cfg.seq_len)
    rows.check_filled("the training split")
    row, owners = rows.row(0), rows.document_ids(0)
    taught = owners[row["labels"] >= 0]  # not one whose image turns out to be damaged
    first = int(taught[0] if len(taught) else owners[owners >= 0][0])
    tokens = row["tokens"][owners == first]
    # A label is the token behind; the first of a document is none.
    learned = np.concatenate([[False], row["labels"][owners == first][:-1] >= 0])
    rules = None if documents.images is None else documents.images.rules
    pads = np.zeros(len(tokens), bool) if rules is None else tokens == rules.pad_token
    parts = []
    for (kind, pad), run in itertools.groupby(zip(learned, pads, tokens, strict=True), _kind):
        ids = np.array([token for _, _, token in run])
        text = f"[image, {len(ids)} tokens]" if pad else tokenizer.show(ids)
        parts.append((text, kind))
    return ChatFacts(
        len(corpus), _rendering(tokenizer, corpus), rows.num_tokens, rows.num_labels,
        rows.num_rows, rows.num_tokens / (rows.num_rows * cfg.seq_len), rows.num_dropped,
        rows.num_truncated, corpus.names[first], parts,
        documents.num_bad, rows.crowded_words if rows.num_crowded else "",
    )  # fmt: skip


def _kind(place: tuple[Any, Any, Any]) -> tuple[bool, bool]:
    """Whether a token is learned, and whether it stands for a part of an image."""
    learned, pad, _ = place
    return bool(learned), bool(pad)


def _rendering(tokenizer: Any, corpus: Corpus) -> str:
    """What makes text of the records: a template or code; prompts and completions are text."""
    assert corpus.chat is not None
    as_written = sum("prompt" in json.loads(text) for text in corpus.texts)
    name = ChatEncoder(tokenizer, corpus.chat).name
    if not as_written:
        return f"rendered by {name}"
    others = f", the others by {name}" if as_written < len(corpus) else ""
    return f"{as_written:,} prompts and completions as they are written{others}"
