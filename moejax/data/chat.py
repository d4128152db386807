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
from moejax.data.image_marks import ImageRef, has_marks, split_marks, without_marks
from moejax.data.image_texts import ImageRules, ImageTokens
from moejax.data.patches import ImageError


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
      images: those in it.
    """

    tokens: Int[np.ndarray, "T"]
    trained: Bool[np.ndarray, "T"]
    num_bytes: int
    images: tuple[ImageTokens, ...] = ()


_NOTHING = Example(np.zeros(0, np.int32), np.zeros(0, bool), 0)


class ChatEncoder:
    """Records to tokens, for one tokenizer.

    Args:
      tokenizer: any of `moejax.data`.
      rules: of the source.
      images: how images stand in a text; None refuses records that have some.

    Attributes:
      bad: a line for each record that was left out because of an image.
    Raises:
      ConfigError: the chat template cannot be used.
    """

    def __init__(self, tokenizer: Any, rules: ChatRules, images: ImageRules | None = None):
        self._tokenizer, self._rules, self._images = tokenizer, rules, images
        self.bad: list[str] = []
        folder = Path(tokenizer.name).parent
        self._template = read_template(folder, rules.template)
        self._format, self.name = _format_of(tokenizer, self._template)
        self._special: dict[str, int] = {"": tokenizer.eos_id}
        names = "|".join(map(re.escape, tokenizer.special_names))
        self._structure = re.compile(names) if names and self._template else None

    def __call__(self, texts: Sequence[str], names: Sequence[str]) -> list[Example]:
        """The examples of records as `conversations.chat_documents` gives them.

        A record with an image that cannot be used has no tokens.

        Raises:
          ConfigError: a record that cannot be rendered; its name is told.
        """
        made: list[Example | None] = [None] * len(texts)
        pieces: list[tuple[int, list[Piece | ImageTokens]]] = []
        for place, (text, name) in enumerate(zip(texts, names, strict=True)):
            record = json.loads(text)
            try:
                if "prompt" in record or self._template is None:
                    pieces.append((place, self._with_images(self._pieces(record))))
                else:
                    self._check_plain(text)
                    made[place] = self._rendered(record)
            except ImageError as error:
                self.bad.append(f"{name}: {error}")
                made[place] = _NOTHING
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

    def _with_images(self, pieces: Iterable[Piece]) -> list[Piece | ImageTokens]:
        """Pieces whose marks are images' tokens."""
        out: list[Piece | ImageTokens] = []
        for piece in pieces:
            if piece.special or not has_marks(piece.text):
                out.append(piece)
                continue
            for part in split_marks(piece.text):
                if isinstance(part, str):
                    out.append(piece._replace(text=part))
                else:
                    out.append(self._image(part))
        return out

    def _image(self, ref: ImageRef) -> ImageTokens:
        if self._images is None:
            raise ConfigError(
                f"holds the image {ref.label}, but rows have no room for images: "
                "data.image_patches=0, or the model has no vision tower. Set data.image_patches "
                "and model.vision.num_layers."
            )
        return self._images.tokens(ref)

    def _joined(
        self, records: list[tuple[int, list[Piece | ImageTokens]]]
    ) -> Iterator[tuple[int, Example]]:
        """All texts are encoded in one call."""
        texts = [
            p.text for _, pieces in records for p in pieces
            if isinstance(p, Piece) and not p.special
        ]  # fmt: skip
        encoded = iter(self._tokenizer.encode_batch(texts))
        for place, pieces in records:
            ids = [self._piece_ids(p, encoded) for p in pieces]
            owners = [p.turn if isinstance(p, Piece) else PROMPT for p in pieces]
            sizes = [len(part) for part in ids]
            turns = np.repeat(owners, sizes)
            is_text = np.repeat([isinstance(p, Piece) for p in pieces], sizes)
            trained = self._learned(turns) & is_text
            kept = turns.max() if self._rules.train_on == "last" else 0
            written = "".join(
                p.text for p in pieces if isinstance(p, Piece) and not p.special
                and (self._rules.train_on == "all" or p.turn >= kept)
            )  # fmt: skip
            images = tuple(p for p in pieces if isinstance(p, ImageTokens))
            yield place, Example(np.concatenate(ids), trained, len(written.encode()), images)

    def _piece_ids(self, piece: Piece | ImageTokens, encoded: Iterator[np.ndarray]) -> np.ndarray:
        if isinstance(piece, ImageTokens):
            return piece.ids
        if piece.special:
            return np.array([self._special_id(piece.text)], np.int32)
        return next(encoded)

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
            ids, starts, _, images = self._encode_marked(text)
            return Example(ids, starts >= 0, len(without_marks(text).encode()), images)
        text, spans = self._template.render(record, last)
        ids, starts, stops, images = self._encode_marked(text)
        trained = np.zeros(len(ids), bool)
        for start, stop in spans[-1:] if last else spans:
            inside = (stops > start) & (starts < stop)
            trained |= inside if self._template.has_generation else self._to_end(ids, inside)
        written = "".join(text[start:stop] for start, stop in (spans[-1:] if last else spans))
        return Example(ids, trained, len(without_marks(written).encode()), images)

    def _encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple]:
        """`encode_offsets` of a text with marks, and its images, whose tokens begin at -1."""
        if not has_marks(text):
            return *self._tokenizer.encode_offsets(text), ()
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        images, at = [], 0
        for part in split_marks(text):
            if isinstance(part, str):
                ids, starts, stops = self._tokenizer.encode_offsets(part)
                parts.append((ids, starts + at, stops + at))
                at += len(part)
            else:
                images.append(self._image(part))
                at += len(part.mark)
                nowhere = np.full(len(images[-1].ids), -1, np.int64)
                parts.append((images[-1].ids, nowhere, nowhere))
        ids, starts, stops = (np.concatenate(column) for column in zip(*parts, strict=True))
        return ids, starts, stops, tuple(images)

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
            said = record["prompt"] + record["completion"]
        else:
            said = "\n".join(message.get("content", "") for message in record["messages"])
        yield without_marks(said)
