"""The `tiktoken.model` of the Kimi family: a file of byte-level BPE ranks and a splitting rule.

Source: the files published with Kimi-K2, Kimi-Linear and Kimi-K3. Ids equal theirs; the test
compares with a plain byte-pair encoder.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tiktoken
from jaxtyping import Int

from moejax.config import ConfigError
from moejax.data.tokenizer_config import CONFIG_FILE, SpecialTokens

MODEL_FILE = "tiktoken.model"
# Ids behind the ranks, named in tokenizer_config.json or not.
NUM_SPECIAL = 256
# The published tokenizer ends a document with it; the configured end of a chat model is a turn's.
_DOCUMENT_END = "[EOS]"

# Letters that may begin a word, and letters that may follow; a run of Han is a piece of its own.
_HEAD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_BEFORE}{_HEAD}*{_TAIL}+{_AFTER}",
        f"{_BEFORE}{_HEAD}+{_TAIL}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The published tokenizer cuts long texts so, and longer runs of blanks or of anything else; a cut
# shows in the ids.
_MAX_CHARS, _MAX_RUN = 400_000, 25_000


class TiktokenTokenizer:
    """A `tiktoken.model` (lines of "base64 rank") with the names of its special tokens.

    The 256 ids behind the ranks are special; one without a name in `tokenizer_config.json` is
    `<|reserved_token_ID|>`. Nothing is added around a text, and a special token's name inside a
    text is plain text unless `specials` asks otherwise.

    Args:
      path: the file.
      special: what the configuration files beside it say.
    Raises:
      ConfigError: the file is missing or damaged (the line is named), or a configured token is
        none of the special ones.
    """

    is_bytewise = True

    def __init__(self, path: str | os.PathLike[str], special: SpecialTokens):
        path = Path(path)
        self.name = str(path)
        ranks, digest = read_ranks(path)
        self.special_ids = _special_ids(path, len(ranks), special)
        shown = {special.names.get(token) for token in special.shown}
        self.special_names = tuple(name for name in self.special_ids if name not in shown)
        self.vocab_size = len(ranks) + len(self.special_ids)
        configured = [self._id_of(name) for name in (special.bos, special.eos, special.pad)]
        self.bos_id, turn_end, self.pad_id = configured
        document_end = self.special_ids.get(_DOCUMENT_END, turn_end)
        if document_end is None:
            raise ConfigError(
                f"tokenizer {path}: no end-of-document token; name {_DOCUMENT_END} among the added "
                f"tokens of {CONFIG_FILE}, or give eos_token."
            )
        self.eos_id = document_end
        ends = [self.eos_id, *([] if turn_end is None else [turn_end]), *special.stop_ids]
        self.stop_ids = tuple(dict.fromkeys(ends))
        if max(self.stop_ids) >= self.vocab_size:
            raise ConfigError(
                f"tokenizer {path}: eos_token_id {max(self.stop_ids)} is not below the "
                f"{self.vocab_size} tokens of the vocabulary."
            )
        self._bytes = _token_bytes(ranks, self.special_ids, special.shown)
        names = sorted(self.special_ids.items(), key=lambda item: item[1])
        self.sha256 = hashlib.sha256(f"{digest} {names} {self.eos_id}".encode()).hexdigest()
        self._encoding = tiktoken.Encoding(
            name=path.name,
            pat_str=PATTERN,
            mergeable_ranks=ranks,
            special_tokens=self.special_ids,
        )

    def _id_of(self, name: str | None) -> int | None:
        if name is None:
            return None
        if name not in self.special_ids:
            raise ConfigError(
                f"tokenizer {Path(self.name).with_name(CONFIG_FILE)}: {name!r} is not among the "
                f"{len(self.special_ids)} special tokens behind the ranks."
            )
        return self.special_ids[name]

    def encode(self, text: str, *, specials: bool = False) -> Int[np.ndarray, "T"]:
        """Token ids of `text`; `specials` also reads the names of special tokens in it."""
        if specials:
            parts = [self._encoding.encode(cut, allowed_special="all") for cut in cuts(text)]
        else:
            parts = [self._encoding.encode_ordinary(cut) for cut in cuts(text)]
        return _joined(parts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        texts_of = [list(cuts(text)) for text in texts]
        flat = [cut for text in texts_of for cut in text]
        parts = iter(
            self._encoding.encode_ordinary_batch(flat, num_threads=max(1, os.cpu_count() or 1))
        )
        return [_joined([next(parts) for _ in text]) for text in texts_of]

    def encode_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, specials read, and the first and last-plus-one character of every token."""
        ids = self.encode(text, specials=True)
        sizes = [len(self._encoding.decode_single_token_bytes(token)) for token in ids.tolist()]
        stops = np.cumsum(np.asarray(sizes, np.int64))
        # Character of each byte: a token may begin or end inside of one, which it then overlaps.
        chars = np.repeat(np.arange(len(text)), [len(char.encode()) for char in text])
        return ids, chars[stops - sizes], chars[stops - 1] + 1

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token adds to a text; none for a special token or an unknown id."""
        return self._bytes[token] if 0 <= token < self.vocab_size else b""

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(token) for token in np.asarray(ids).tolist())
        return data.decode(errors="replace")

    def show(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens by their names."""
        return self._encoding.decode(np.asarray(ids).tolist())


def read_ranks(path: Path) -> tuple[dict[bytes, int], str]:
    """Reads a file of "base64 rank" lines.

    Returns:
      Token bytes to rank, and the hash of the file.
    Raises:
      ConfigError: a line is malformed, repeats a token or a rank, or a rank or byte is missing.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer {path}: cannot be read ({error.strerror}).") from error
    ranks: dict[bytes, int] = {}
    line_of: dict[int, int] = {}
    for number, line in enumerate(data.splitlines(), start=1):
        if not line:
            continue
        token, rank = _parse_line(path, number, line)
        if token in ranks or rank in line_of:
            same = f"rank {rank}" if rank in line_of else f"token {token!r}"
            first = line_of[rank if rank in line_of else ranks[token]]
            raise ConfigError(f"tokenizer {path} line {number}: {same} repeats line {first}.")
        ranks[token], line_of[rank] = rank, number
    missing = next((rank for rank in range(len(ranks)) if rank not in line_of), None)
    if missing is not None:
        raise ConfigError(
            f"tokenizer {path} line {line_of[max(line_of)]}: rank {max(line_of)} is given, but "
            f"rank {missing} is on no line."
        )
    lost = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if lost is not None:
        raise ConfigError(f"tokenizer {path}: byte 0x{lost:02x} is on none of {len(ranks)} lines.")
    return ranks, hashlib.sha256(data).hexdigest()


def _parse_line(path: Path, number: int, line: bytes) -> tuple[bytes, int]:
    fields = line.split(b" ")
    # No rank of a real file has ten digits, and a number of a million digits takes long to read.
    if len(fields) != 2 or not fields[1].isdigit() or len(fields[1]) > 9:
        raise ConfigError(
            f"tokenizer {path} line {number}: must be a token in base64, one blank and its rank, "
            f"not {line[:40]!r}."
        )
    try:
        token = base64.b64decode(fields[0], validate=True)
    except binascii.Error as error:
        raise ConfigError(f"tokenizer {path} line {number}: not base64 ({error}).") from error
    if not token:
        raise ConfigError(f"tokenizer {path} line {number}: the token is empty.")
    return token, int(fields[1])


def _special_ids(path: Path, first: int, special: SpecialTokens) -> dict[str, int]:
    """Names to ids of the block behind the ranks; a named id above the block makes it longer."""
    inside = [token for token in special.names if token >= first]
    if inside and max(inside) >= first + 2 * NUM_SPECIAL:
        raise ConfigError(
            f"tokenizer {path}: {CONFIG_FILE} names id {max(inside)}, far above the {first} ranks "
            f"and {NUM_SPECIAL} special tokens; do the files belong together?"
        )
    end = max([first + NUM_SPECIAL - 1, *inside]) + 1
    ids: dict[str, int] = {}
    for token in range(first, end):
        name = special.names.get(token, f"<|reserved_token_{token}|>")
        if not name or name in ids:
            raise ConfigError(
                f"tokenizer {path}: {CONFIG_FILE} gives id {token} the name {name!r}, which is "
                f"{'empty' if not name else f'that of id {ids[name]}'}."
            )
        ids[name] = token
    return ids


def _token_bytes(
    ranks: dict[bytes, int], special_ids: dict[str, int], shown: frozenset[int]
) -> list[bytes]:
    table = [b""] * (len(ranks) + len(special_ids))
    for token, rank in ranks.items():
        table[rank] = token
    for name, special in special_ids.items():
        table[special] = name.encode() if special in shown else b""
    return table


def cuts(text: str) -> Iterator[str]:
    """The pieces of a long text that are encoded one by one; a short text is one piece."""
    for start in range(0, len(text), _MAX_CHARS):
        part = text[start : start + _MAX_CHARS]
        if len(part) <= _MAX_RUN:
            yield part
        else:
            yield from _cut_runs(part)


def _cut_runs(text: str) -> Iterator[str]:
    """Cuts where more than `_MAX_RUN` blanks, or characters that are none, would stand in a row."""
    start, run, was_blank = 0, 0, text[0].isspace()
    for at, char in enumerate(text):
        blank = char.isspace()
        run = run + 1 if blank == was_blank else 1
        was_blank = blank
        if run > _MAX_RUN:
            yield text[start:at]
            start, run = at, 1
    yield text[start:]


def _joined(parts: Iterable[Sequence[int]]) -> Int[np.ndarray, "T"]:
    return np.asarray([token for part in parts for token in part], np.int32)
