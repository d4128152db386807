"""The documents of one split, held in memory or read when they are asked for.

A hash of a document's name alone says whether it belongs to the training or to the validation
split, so adding a document moves no other, and no name is ever in both.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import numpy as np

from moejax.config import ConfigError

if TYPE_CHECKING:
    from moejax.data.cache import TokenCache
    from moejax.data.chat import ChatRules

Split = Literal["train", "validation", "all"]
# Documents read at once: enough to be fast, few enough to fit whatever their size.
CHUNK = 512


class Reader(Protocol):
    """Random access to documents that stay where they are; pickled, it opens its files anew."""

    def __len__(self) -> int:
        """Number of documents."""
        ...

    def name(self, index: int) -> str:
        """The name of document `index`, the same on every machine."""
        ...

    def texts(self, indices: Sequence[int]) -> list[str]:
        """The texts of some documents, without reading the others; a missing one is ""."""
        ...


class LazyTexts(Sequence[str]):
    """Some documents of a reader, read when they are asked for."""

    def __init__(self, reader: Reader, indices: np.ndarray):
        self.reader, self.indices = reader, indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place):
        if isinstance(place, slice):
            return tuple(self.reader.texts(self.indices[place].tolist()))
        return self.reader.texts([int(self.indices[place])])[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), CHUNK):
            yield from self[start : start + CHUNK]


class LazyNames(Sequence[str]):
    """The names of some documents, made when they are asked for."""

    def __init__(self, name: Callable[[int], str], indices: Any):
        self._name, self._indices = name, indices

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place):
        if isinstance(place, slice):
            return tuple(self._name(int(index)) for index in self._indices[place])
        return self._name(int(self._indices[place]))


class Joined(Sequence[str]):
    """Several sequences, one behind the other."""

    def __init__(self, parts: Sequence[Sequence[str]]):
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[str, ...]: ...
    def __getitem__(self, place):
        if isinstance(place, slice):
            return tuple(self[index] for index in range(*place.indices(len(self))))
        place = range(len(self))[place]
        part = int(np.searchsorted(self._ends, place, side="right"))
        return self._parts[part][place - (int(self._ends[part - 1]) if part else 0)]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of one split, in a fixed order.

    Attributes:
      name: what the source was, for messages.
      names: one name a document: its relative path, with `:line` or `:row` where a file holds many.
      texts: one text a document, never empty; may be read only when asked for.
      num_bytes: bytes of all texts in UTF-8.
      sha256: hash over every name and text; equal exactly when the split holds the same documents.
      parts: the members of a mixture, whose documents stand here one behind the other.
      cache: where the tokens are, when the documents are tokenised already; then there is no text.
      chat: how the documents become tokens, when they are records of conversations.
    """

    name: str
    names: Sequence[str]
    texts: Sequence[str]
    num_bytes: int
    sha256: str
    parts: tuple[Corpus, ...] = ()
    cache: TokenCache | None = None
    chat: ChatRules | None = None

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def from_documents(cls, name: str, documents: Iterable[tuple[str, str]]) -> Corpus:
        """A corpus of (name, text) pairs; sorts them and drops empty texts."""
        kept = sorted((doc, text) for doc, text in documents if text)
        digest, num_bytes = hashlib.sha256(), 0
        for doc, text in kept:
            num_bytes += add_document(digest, doc, text)
        names, texts = tuple(doc for doc, _ in kept), tuple(text for _, text in kept)
        return cls(name, names, texts, num_bytes, digest.hexdigest())

    @classmethod
    def from_reader(cls, name: str, texts: LazyTexts) -> Corpus:
        """A corpus that stays where it is; one pass drops empty texts and takes the hash."""
        digest, num_bytes = hashlib.sha256(), 0
        kept = np.zeros(len(texts), bool)
        for place, text in enumerate(texts):
            if text:
                document = texts.reader.name(int(texts.indices[place]))
                num_bytes += add_document(digest, document, text)
                kept[place] = True
        full = LazyTexts(texts.reader, texts.indices[kept])
        names = LazyNames(texts.reader.name, full.indices)
        return cls(name, names, full, num_bytes, digest.hexdigest())

    @classmethod
    def join(cls, parts: Sequence[Corpus]) -> Corpus:
        """The corpora of a mixture as one."""
        digest = hashlib.sha256()
        for part in parts:
            digest.update(f"{part.name} {part.sha256}\n".encode())
        return cls(
            "mixture of " + ", ".join(part.name for part in parts),
            Joined([part.names for part in parts]),
            Joined([part.texts for part in parts]),
            sum(part.num_bytes for part in parts),
            digest.hexdigest(),
            tuple(parts),
        )


def add_document(digest: Any, name: str, text: str) -> int:
    """Adds one document to a hash. Returns the bytes of its text.

    Lengths go in as well: without them a byte could move from the name to the text unseen.
    """
    try:
        data = text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character: "\ud800"
        raise ConfigError(
            f"{name}: the text is not valid Unicode ({reason(error)}). "
            "Mend this record, or leave it out."
        ) from error
    digest.update(f"{len(name.encode())} {len(data)} {name}".encode() + data)
    return len(data)


def reason(error: BaseException) -> str:
    """An error of another library as part of one line."""
    return " ".join(str(error).split()).rstrip(".")


def split_hash(name: str) -> float:
    """Where a document's name falls in [0, 100); validation takes the low end."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 * 100


_T = TypeVar("_T")


def in_split(
    items: Iterable[_T], name_of: Callable[[_T], str], split: Split, percent: float
) -> list[_T]:
    """The items whose name falls into `split`.

    Of two or more items at least one goes to either split: where the hash leaves a split empty,
    the item nearest to it fills it.
    """
    places = [(split_hash(name_of(item)), name_of(item), item) for item in items]
    placed = sorted(places, key=lambda place: place[:2])
    cut = _cut(sum(place < percent for place, _, _ in placed), len(placed))
    chosen = {"validation": placed[:cut], "train": placed[cut:], "all": placed}[split]
    return [item for _, _, item in chosen]


def split_indices(reader: Reader, split: Split, percent: float) -> np.ndarray:
    """`in_split` for the documents of a reader: their indices, ascending."""
    count = len(reader)
    if split == "all":
        return np.arange(count)
    hashes = np.fromiter((split_hash(reader.name(i)) for i in range(count)), np.float64, count)
    order = np.argsort(hashes, kind="stable")
    cut = _cut(int((hashes < percent).sum()), count)
    return np.sort(order[:cut] if split == "validation" else order[cut:])


def _cut(below: int, count: int) -> int:
    """How many of `count` documents are held out when `below` of them fall below the share."""
    return min(max(below, 1), count - 1) if count >= 2 else below
