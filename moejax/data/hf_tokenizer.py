"""A `tokenizer.json` of the Hugging Face `tokenizers` library."""

import functools
import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import pre_tokenizers

from moejax.config import ConfigError
from moejax.data.tokenizer_config import SpecialTokens

END_OF_TEXT = "<|endoftext|>"
# Names under which published tokenizers keep the token that ends a document, ours first. The
# configured end comes before the last of them, which ends a turn.
_END_NAMES = (END_OF_TEXT, "[EOS]", "<|end_of_text|>", "</s>", "<eos>")
_TURN_END = "<|im_end|>"
_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")


class HfTokenizer:
    """A `tokenizer.json` of the `tokenizers` library.

    Nothing is added around a text (no begin token), and a special token's name inside a text is
    plain text unless `specials` asks otherwise: a document cannot end itself.

    Args:
      path: the file.
      special: what the configuration files beside it say; None: nothing.
    Raises:
      ConfigError: the file is missing or damaged, or names no end-of-document token.
    """

    def __init__(self, path: str | os.PathLike[str], special: SpecialTokens | None = None):
        special = special or SpecialTokens()
        self.name = str(path)
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"tokenizer {path}: cannot be read ({error.strerror}).") from error
        self._hf = _parse(path, data)
        self._hf.encode_special_tokens = True
        self._data = data
        vocab = self._hf.get_vocab(with_added_tokens=True)
        # Not the number of tokens: published vocabularies have holes.
        self.vocab_size = max(vocab.values()) + 1
        ends = [*_END_NAMES, special.eos, _TURN_END]
        known = [vocab[name] for name in ends if name is not None and name in vocab]
        if not known:
            raise ConfigError(
                f"tokenizer {path}: no end-of-document token; one of "
                f"{', '.join((*_END_NAMES, _TURN_END))} or an eos_token in tokenizer_config.json "
                "is needed."
            )
        self.eos_id = known[0]
        self.bos_id, self.pad_id = vocab.get(special.bos or ""), vocab.get(special.pad or "")
        turn_end = [vocab[special.eos]] if special.eos in vocab else []
        self.stop_ids = tuple(dict.fromkeys([self.eos_id, *turn_end, *special.stop_ids]))
        # Without a configured end the file alone decides the ids; a run's cached file stays as it
        # is known.
        chosen = b"" if set(vocab) & set(_END_NAMES) else f" {self.eos_id}".encode()
        self.sha256 = hashlib.sha256(data + chosen).hexdigest()
        added = self._hf.get_added_tokens_decoder()
        self._hidden = frozenset(token for token, entry in added.items() if entry.special)
        self.special_names = tuple(entry.content for entry in added.values() if entry.special)
        kinds = _decoder_kinds(json.loads(data).get("decoder"))
        self.is_bytewise = kinds == ["ByteLevel"]
        self._has_byte_pieces = "ByteFallback" in kinds

    def encode(self, text: str, *, specials: bool = False) -> Int[np.ndarray, "T"]:
        """Token ids of `text`; `specials` also reads the names of special tokens in it."""
        hf = self._with_specials if specials else self._hf
        return np.asarray(hf.encode(text, add_special_tokens=False).ids, np.int32)

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        return _parse(self.name, self._data)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        # The fast form leaves out the offsets into the text, which nothing here reads.
        encoded = self._hf.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, np.int32) for one in encoded]

    def encode_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids, specials read, and the first and last-plus-one character of every token."""
        encoded = self._with_specials.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoded.offsets, np.int64).reshape(-1, 2)
        return np.asarray(encoded.ids, np.int32), offsets[:, 0], offsets[:, 1]

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token adds to a text, where `is_bytewise` says that there are such."""
        piece = None if token in self._hidden else self._hf.id_to_token(token)
        if piece is None:
            return b""
        # An added token may hold characters that stand for no byte: it is text as it is.
        table = _byte_of_char()
        in_bytes = table.keys() >= set(piece)
        return bytes(table[char] for char in piece) if in_bytes else piece.encode()

    def continues_bytes(self, token: int) -> bool:
        """True when the text up to this token is settled by a later one only."""
        piece = None if token in self._hidden else self._hf.id_to_token(token)
        return piece is None or self._has_byte_pieces and bool(_BYTE_PIECE.fullmatch(piece))

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens left out."""
        return self._hf.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)

    def show(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens by their names."""
        return self._hf.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=False)


def _parse(path: str | os.PathLike[str], data: bytes) -> tokenizers.Tokenizer:
    try:
        hf = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"tokenizer {path}: not a tokenizer.json ({error}).") from error
    hf.no_padding()
    hf.no_truncation()
    return hf


def _decoder_kinds(decoder: Any) -> list[str]:
    """The decoders of a file, one behind the other."""
    if not decoder:
        return []
    if decoder["type"] == "Sequence":
        return [kind for inner in decoder["decoders"] for kind in _decoder_kinds(inner)]
    return [decoder["type"]]


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """Byte-level files write a byte as a printable character: itself, or one from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if chr(byte) not in table]
    table |= {chr(0x100 + at): byte for at, byte in enumerate(others)}
    if table.keys() != set(pre_tokenizers.ByteLevel.alphabet()):
        raise RuntimeError("the byte alphabet of the tokenizers library has changed.")
    return table
