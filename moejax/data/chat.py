"""Conversations as tokens, and which of them are learned.

Only what an assistant wrote and the token that ends it is learned (`data.train_on`); everything
else is read. Which rendering a tokenizer gets: `data.chat_template`, its own chat template, that of
its family by code (Kimi-K3, Kimi-K2), or a plain one.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from moejax.config import ConfigError, SourceFields
from moejax.data.chat_formats import (
    END,
    PROMPT,
    Format,
    Piece,
    k3_format,
    kimi_format,
    plain_format,
)
from moejax.data.chat_template import ChatTemplate, read_template


@dataclasses.dataclass(frozen=True)
class ChatRules:
    """How the records of a source become rows.

    Attributes:
      train_on: "completion" (every answer), "last" (the last one), or "all" (every token).
      too_long: "drop" or "truncate" what does not fit a row.
      template: file of the chat template; empty for the tokenizer's.
    """

    train_on: str = "completion"
    too_long: str = "drop"
    template: str = ""

    @classmethod
    def of(cls, cfg: SourceFields) -> "ChatRules":
        return cls(cfg.train_on, cfg.too_long, cfg.chat_template)


class Example(NamedTuple):
    """A rendered record.

    Attributes:
      tokens: its token ids.
      trained: which of them are learned.
      num_bytes: bytes of the learned text.
    """

    tokens: Int[np.ndarray, "T"]
    trained: Bool[np.ndarray, "T"]
    num_bytes: int


class ChatEncoder:
    """Records to tokens, for one tokenizer.

    Args:
      tokenizer: any of `moejax.data`.
      rules: of the source.
    Raises:
      ConfigError: the chat template cannot be used.
    """

    def __init__(self, tokenizer: Any, rules: ChatRules):
        self._tokenizer, self._rules = tokenizer, rules
        folder = Path(tokenizer.name).parent
        self._template = read_template(folder, rules.template)
        self._format, self.name = _format_of(tokenizer, self._template)
        self._special: dict[str, int] = {"": tokenizer.eos_id}
        names = "|".join(map(re.escape, tokenizer.special_names))
        self._structure = re.compile(names) if names and self._template else None

    def __call__(self, texts: Sequence[str], names: Sequence[str]) -> list[Example]:
        """The examples of records as `conversations.chat_documents` gives them.

        Raises:
          ConfigError: a record that cannot be rendered; its name is told.
        """
        made: list[Example | None] = [None] * len(texts)
        pieces: list[tuple[int, list[Piece]]] = []
        for place, (text, name) in enumerate(zip(texts, names, strict=True)):
            record = json.loads(text)
            try:
                if "prompt" in record or self._template is None:
                    pieces.append((place, list(self._pieces(record))))
                else:
                    self._check_plain(text)
                    made[place] = self._rendered(record)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        for place, example in self._joined(pieces):
            made[place] = example
        return [example for example in made if example is not None]

    def _check_plain(self, text: str) -> None:
        """A template makes one text of structure and contents: these must not look like it."""
        if self._structure is not None and (found := self._structure.search(text)):
            raise ConfigError(
                f"holds the special token {found[0]!r}, which would end or open a turn in the "
                "rendered text. Take it out, or leave out the record."
            )

    def _pieces(self, record: dict[str, Any]) -> Iterator[Piece]:
        if "prompt" in record:
            yield from (Piece(record["prompt"]), Piece(record["completion"], turn=0))
            yield END._replace(turn=0)
            return
        skipped = sum(m["role"] == "assistant" for m in record["messages"][: record["first"]])
        for piece in self._format(record):
            yield piece if piece.turn >= skipped else piece._replace(turn=PROMPT)

    def _joined(self, records: list[tuple[int, list[Piece]]]) -> Iterator[tuple[int, Example]]:
        """All texts are encoded in one call."""
        texts = [p.text for _, pieces in records for p in pieces if not p.special]
        encoded = iter(self._tokenizer.encode_batch(texts))
        for place, pieces in records:
            ids = [
                np.array([self._special_id(p.text)], np.int32) if p.special else next(encoded)
                for p in pieces
            ]
            turns = np.repeat([p.turn for p in pieces], [len(part) for part in ids])
            trained = self._learned(turns)
            kept = turns.max() if self._rules.train_on == "last" else 0
            written = "".join(
                p.text for p in pieces if not p.special
                and (self._rules.train_on == "all" or p.turn >= kept)
            )  # fmt: skip
            yield place, Example(np.concatenate(ids), trained, len(written.encode()))

    def _learned(self, turns: Int[np.ndarray, "T"]) -> Bool[np.ndarray, "T"]:
        if self._rules.train_on == "all":
            return np.ones(len(turns), bool)
        return turns == turns.max() if self._rules.train_on == "last" else turns > PROMPT

    def _special_id(self, name: str) -> int:
        if name not in self._special:
            self._special[name] = int(_only(self._tokenizer.encode(name, specials=True), name))
        return self._special[name]

    def _rendered(self, record: dict[str, Any]) -> Example:
        """A record by the template; a token is learned that overlaps what the assistant wrote."""
        assert self._template is not None
        last = self._rules.train_on == "last"
        if self._rules.train_on == "all":
            text = self._template.plain(record)
            ids = self._tokenizer.encode(text, specials=True)
            return Example(ids, np.ones(len(ids), bool), len(text.encode()))
        text, spans = self._template.render(record, last)
        ids, starts, stops = self._tokenizer.encode_offsets(text)
        trained = np.zeros(len(ids), bool)
        for start, stop in spans[-1:] if last else spans:
            inside = (stops > start) & (starts < stop)
            trained |= inside if self._template.has_generation else self._to_end(ids, inside)
        written = "".join(text[start:stop] for start, stop in (spans[-1:] if last else spans))
        return Example(ids, trained, len(written.encode()))

    def _to_end(self, ids: np.ndarray, inside: np.ndarray) -> np.ndarray:
        """Without what stands between the token that ends a turn and the next turn."""
        ends = np.flatnonzero(inside & np.isin(ids, self._tokenizer.stop_ids))
        if len(ends):
            inside = inside & (np.arange(len(ids)) <= ends[-1])
        return inside


def _format_of(tokenizer: Any, template: ChatTemplate | None) -> tuple[Format, str]:
    """The rendering by code, and what to call the one that is used."""
    if template is not None:
        return plain_format, f"chat template {template.origin}"
    if _knows(tokenizer, "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"):
        return k3_format, "Kimi-K3's tags"
    if _knows(tokenizer, "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"):
        return kimi_format, "Kimi-K2's turns"
    return plain_format, "plain `### role` headings"


def _knows(tokenizer: Any, *names: str) -> bool:
    return all(len(tokenizer.encode(name, specials=True)) == 1 for name in names)


def _only(ids: np.ndarray, name: str) -> Any:
    if len(ids) != 1:
        raise ConfigError(f"{name} is no special token of this tokenizer.")
    return ids[0]


def readable(texts: Iterable[str]) -> Iterator[str]:
    """What records say, without their form: the texts to train a tokenizer on."""
    for text in texts:
        record = json.loads(text)
        if "prompt" in record:
            yield record["prompt"] + record["completion"]
        else:
            yield "\n".join(message.get("content", "") for message in record["messages"])
