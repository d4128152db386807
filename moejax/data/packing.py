"""Documents into rows of fixed length: no padding in between, nothing that crosses a border.

A document is its tokens and eos. Documents stand one behind the other in a stream, in some order,
and row r is the stream's tokens [r T, (r+1) T). A document longer than what is left of a row goes
on in the next one, as a segment of its own. Any row can so be made alone, from the documents'
lengths.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Integer

from moejax.config import ConfigError
from moejax.data.cache import TokenShards
from moejax.data.chat import ChatEncoder, ChatRules, Example
from moejax.data.corpus import CHUNK, Corpus, LazyTexts
from moejax.data.image_texts import DocumentImages, ImageRules, tell_bad
from moejax.data.tokenize import Tokenizer
from moejax.data.whole_rows import IGNORED, WholeRows

# Bytes of text above which tokenising at every start is worth a remark: about a minute's work.
_LARGE = 500_000_000
_LOG = logging.getLogger(__name__)
Row = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Documents:
    """Tokenized documents, end to end.

    Attributes:
      tokens: every document's tokens, each closed by eos; an array, or mapped files.
      starts: int64, where document i begins; one more entry than documents, the last is the number
        of tokens.
      eos_id: the closing token, which also stands where a row is padded.
      trained: of conversations, which tokens are learned; they are packed whole then.
      trained_bytes: bytes of the learned text of each of them.
      too_long: "drop" or "truncate" those that do not fit a row.
      images: those of each document; None where there are none.
    """

    tokens: Integer[np.ndarray, "M"] | TokenShards
    starts: Int[np.ndarray, "X"]
    eos_id: int
    trained: Bool[np.ndarray, "M"] | None = None
    trained_bytes: Int[np.ndarray, "N"] | None = None
    too_long: str = "drop"
    images: DocumentImages | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def num_bad(self) -> int:
        """Documents that are left out because of an image."""
        return 0 if self.images is None else self.images.num_bad

    @property
    def lengths(self) -> Int[np.ndarray, "X"]:
        """Tokens of each document, eos counted."""
        return np.diff(self.starts)

    @classmethod
    def from_token_lists(cls, documents: list[np.ndarray], eos_id: int) -> "Documents":
        """Closes each document with `eos_id` and joins them."""
        starts = np.zeros(len(documents) + 1, np.int64)
        np.cumsum([len(document) + 1 for document in documents], out=starts[1:])
        tokens = np.full(starts[-1], eos_id, np.int32)
        for start, document in zip(starts[:-1], documents, strict=True):
            tokens[start : start + len(document)] = document
        return cls(tokens, starts, eos_id)


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """The smallest type that keeps the ids: uint16 up to 65,536 tokens, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def tokenize_corpus(
    tokenizer: Tokenizer, corpus: Corpus, images: ImageRules | None = None
) -> Documents:
    """All documents of `corpus` as tokens, in its order; those of a cache stay in their files.

    Args:
      tokenizer: whose tokens they are.
      corpus: the documents.
      images: how those of conversations stand in the text; None: they have none.
    Raises:
      ConfigError: a cache was made with another tokenizer.
    """
    if corpus.chat is not None:
        return _conversations(tokenizer, corpus, corpus.chat, images)
    if corpus.parts:
        return _joined([tokenize_corpus(tokenizer, part, images) for part in corpus.parts])
    if corpus.cache is not None:
        corpus.cache.check(tokenizer)
        starts = np.zeros(len(corpus) + 1, np.int64)
        np.cumsum(corpus.cache.lengths, out=starts[1:])
        return Documents(corpus.cache.tokens, starts, tokenizer.eos_id)
    if isinstance(corpus.texts, LazyTexts):
        if corpus.num_bytes > _LARGE:
            _LOG.warning(
                "tokenising %.1f GB of %s at every start; `moejax data prepare` does it once",
                corpus.num_bytes / 1e9,
                corpus.name,
            )
        # Chunk by chunk, so that the texts are never in memory together.
        dtype, chunks = token_dtype(tokenizer.vocab_size), []
        for at in range(0, len(corpus), CHUNK):
            encoded = tokenizer.encode_batch(corpus.texts[at : at + CHUNK])
            chunk = Documents.from_token_lists(encoded, tokenizer.eos_id)
            chunks.append(dataclasses.replace(chunk, tokens=chunk.tokens[:].astype(dtype)))
        return _joined(chunks)
    return Documents.from_token_lists(tokenizer.encode_batch(corpus.texts), tokenizer.eos_id)


def _conversations(
    tokenizer: Tokenizer, corpus: Corpus, rules: ChatRules, images: ImageRules | None
) -> Documents:
    """Rendered records, with what of them is learned; nothing is put behind them."""
    encode, made = ChatEncoder(tokenizer, rules, images), []
    for at in range(0, len(corpus), CHUNK):
        made += encode(corpus.texts[at : at + CHUNK], corpus.names[at : at + CHUNK])
    starts = np.zeros(len(made) + 1, np.int64)
    np.cumsum([len(example.tokens) for example in made], out=starts[1:])
    return Documents(
        np.concatenate([example.tokens for example in made]),
        starts,
        tokenizer.eos_id,
        np.concatenate([example.trained for example in made]),
        np.array([example.num_bytes for example in made], np.int64),
        rules.too_long,
        _images(made, images, encode.bad, corpus.names),
    )


def _images(
    made: list[Example], rules: ImageRules | None, bad: list[str], names: Sequence[str]
) -> DocumentImages | None:
    """Those of conversations, where any has some."""
    images = [example.images for example in made]
    tell_bad(bad)
    if rules is None or not (any(images) or bad):
        return None
    patches = [sum(rows * columns for _, _, (rows, columns) in own) for own in images]
    return DocumentImages(rules, images, np.array(patches, np.int64), len(bad), names)


def _joined(parts: list[Documents]) -> Documents:
    """The documents of several, one behind the other; no token is copied."""
    arrays: list[np.ndarray] = []
    if any(part.trained is not None for part in parts):
        raise ConfigError(
            "data.mixture with conversations cannot be read as one text: name each source alone."
        )
    for part in parts:
        arrays += part.tokens.parts if isinstance(part.tokens, TokenShards) else [part.tokens]
    starts = np.zeros(1 + sum(len(part) for part in parts), np.int64)
    np.cumsum(np.concatenate([part.lengths for part in parts]), out=starts[1:])
    return Documents(TokenShards(arrays), starts, parts[0].eos_id)


class PackedRows:
    """The rows of one order of the documents, each made when it is asked for.

    Args:
      documents: the tokens.
      order: document indices in stream order.
      seq_len: T, tokens a row.
    """

    def __init__(self, documents: Documents, order: Int[np.ndarray, "X"], seq_len: int):
        self._documents, self._order, self._seq_len = documents, order, seq_len
        # Where in the stream each document of the order ends.
        self._ends = np.cumsum(documents.lengths[order])
        self.num_tokens = int(self._ends[-1]) if len(order) else 0
        self.num_full = self.num_tokens // seq_len
        self.num_rows = -(-self.num_tokens // seq_len)

    @property
    def num_labels(self) -> int:
        """Positions that have a label: a document's or a row's first token is no label."""
        begins = self._ends - self._documents.lengths[self._order]
        borders = np.union1d(begins, np.arange(0, self.num_tokens, self._seq_len))
        return self.num_tokens - len(borders)

    def row(self, index: int) -> Row:
        """Row `index` of `num_rows`; the last one, where short, is padded in front.

        Returns:
          int32 arrays [T]: `tokens`; `segment_ids`, 1, 2, ... along the row, 0 for padding (which
          stands in front because ids must not decrease); `labels`, the next token of the same
          segment, -100 where there is none.
        """
        pieces = [self._documents.tokens[start:stop] for _, start, stop in self._pieces(index)]
        lengths = np.array([len(piece) for piece in pieces])
        padding = self._seq_len - lengths.sum()
        tokens = np.concatenate([np.full(padding, self._documents.eos_id), *pieces])
        tokens = tokens.astype(np.int32)
        segment_ids = np.repeat(np.arange(len(pieces) + 1, dtype=np.int32), [padding, *lengths])
        return {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "labels": next_token_labels(tokens, segment_ids),
        }

    def document_ids(self, index: int) -> Int[np.ndarray, "T"]:
        """Which document each token of row `index` is of; -1 where the row is padded."""
        pieces = list(self._pieces(index))
        lengths = [stop - start for _, start, stop in pieces]
        documents = [-1, *(document for document, _, _ in pieces)]
        padding = self._seq_len - sum(lengths)
        return np.repeat(np.asarray(documents, np.int32), [padding, *lengths])

    def _pieces(self, index: int) -> Iterator[tuple[int, int, int]]:
        """The parts of documents in row `index`: (document, start, stop) in the tokens."""
        if not 0 <= index < self.num_rows:
            raise IndexError(f"row {index} of {self.num_rows}")
        at, stop = index * self._seq_len, min((index + 1) * self._seq_len, self.num_tokens)
        place = int(np.searchsorted(self._ends, at, side="right"))
        while at < stop:
            end, document = int(self._ends[place]), int(self._order[place])
            # Counted back from the document's end, its place in the stream needs no second table.
            start = int(self._documents.starts[document + 1]) - (end - at)
            size = min(end, stop) - at
            yield document, start, start + size
            at, place = at + size, place + 1


def pack(documents: Documents, order: Int[np.ndarray, "X"], seq_len: int) -> PackedRows | WholeRows:
    """Rows of the documents in this order: conversations whole, others end to end."""
    rows = PackedRows if documents.trained is None else WholeRows
    return rows(documents, order, seq_len)


def next_token_labels(
    tokens: Int[np.ndarray, "T"], segment_ids: Int[np.ndarray, "T"]
) -> Int[np.ndarray, "T"]:
    """labels_t = tokens_{t+1} where both stand in one segment that is no padding, else -100."""
    labels = np.full_like(tokens, IGNORED)
    same = (segment_ids[1:] == segment_ids[:-1]) & (segment_ids[:-1] > 0)
    labels[:-1][same] = tokens[1:][same]
    return labels


def padding_row(seq_len: int, eos_id: int) -> Row:
    """A row that is padding throughout and has no label."""
    zeros = np.zeros(seq_len, np.int32)
    return {
        "tokens": zeros + np.int32(eos_id),
        "segment_ids": zeros,
        "labels": zeros + np.int32(IGNORED),
    }
