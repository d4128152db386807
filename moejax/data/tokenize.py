"""Tokenizers: bytes, a byte-level BPE trained here, and those that models are published with."""

import hashlib
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import decoders, models, pre_tokenizers, trainers

from moejax.config import ConfigError, DataConfig
from moejax.data.chat import readable
from moejax.data.hf_tokenizer import END_OF_TEXT, HfTokenizer
from moejax.data.sources import load_corpus
from moejax.data.tiktoken_bpe import MODEL_FILE, TiktokenTokenizer
from moejax.data.tokenizer_config import CONFIG_FILE, read_special_tokens

CACHE_FILE = "tokenizer.json"
# A sixth of the standard library gives the bytes a token of all of it, in a sixth of the time.
_SAMPLE_BYTES = 2_000_000
# Merges stay inside a line, taken with the line ends and the indentation in front of it, but may
# cross words: `\n        self.` is one token. Bytes a token of the standard library's validation
# split at 512 tokens: GPT-4's rule 1.96, GPT-2's 2.01, a word and all up to the next 2.11, this
# one 2.15; a 4-gram model of the tokens agrees (1.124 nats a byte there, 1.116 here).
_PIECES = r"\n* *[^\n]+"
# Learning merges takes time with the square of a piece's length, and a text may be one line. What
# is longer than 2,000 characters is learned from in parts, cut in front of a space where there is
# one; texts without such lines give what they gave without the rule.
_TOO_LONG = re.compile(r"[^\n]{2001}|\n{2001}")
_PARTS = re.compile(r"\n{0,2000}(?:[^\n]{1,2000}(?!\S)|[^\n]{1,2000})|\n{1,2000}")


@runtime_checkable
class Tokenizer(Protocol):
    """What training and generation need of a tokenizer.

    Attributes:
      name: for messages.
      vocab_size: token ids are below it.
      eos_id: the token put behind every document.
      bos_id: the token that begins a text, None if the tokenizer has none.
      pad_id: the token for padding, None if the tokenizer has none.
      stop_ids: the tokens at which generation ends, `eos_id` first.
      special_names: names of the tokens that are no text.
      sha256: equal exactly for tokenizers that give the same ids.
    """

    name: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    pad_id: int | None
    stop_ids: tuple[int, ...]
    special_names: tuple[str, ...]
    sha256: str

    def encode(self, text: str, *, specials: bool = False) -> Int[np.ndarray, "T"]:
        """Token ids of `text`, int32, without eos; `specials` reads names of special tokens in it.

        Without `specials` such a name is plain text: a document cannot end itself.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of every text, on all cores where the tokenizer can."""
        ...

    def encode_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`encode` with `specials`, and the first and last-plus-one character of every token."""
        ...

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens left out; undoes `encode`."""
        ...

    def show(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text of the ids, special tokens by their names; for people."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the text in UTF-8; 256 ends a document."""

    name = "byte"
    vocab_size = 257
    eos_id = 256
    bos_id: int | None = None
    pad_id: int | None = None
    stop_ids: tuple[int, ...] = (256,)
    special_names: tuple[str, ...] = ()
    is_bytewise = True
    sha256 = hashlib.sha256(b"utf-8 bytes, eos 256").hexdigest()

    def encode(self, text: str, *, specials: bool = False) -> Int[np.ndarray, "T"]:
        """The bytes; there are no names of special tokens that `specials` could read."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = np.fromiter((len(char.encode()) for char in text), np.int64, len(text))
        starts = np.repeat(np.arange(len(text)), sizes)
        return self.encode(text), starts, starts + 1

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def show(self, ids: Int[np.ndarray, "T"]) -> str:
        parts = np.split(np.asarray(ids), np.flatnonzero(np.asarray(ids) == self.eos_id))
        texts = [self.decode(part) for part in parts]
        return END_OF_TEXT.join(texts)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model folder, or of one of its files.

    Args:
      path: a `tokenizer.json`, a `tiktoken.model`, or a folder with one of them (the first wins).
        `tokenizer_config.json` and `generation_config.json` beside it name the begin, end, padding
        and stop tokens; a `tiktoken.model` needs the first of them.
    Raises:
      ConfigError: no such file, or one is damaged.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in (CACHE_FILE, MODEL_FILE) if (path / name).exists()]
        if not files:
            raise ConfigError(f"{path} has neither a {CACHE_FILE} nor a {MODEL_FILE}.")
        path = files[0]
    special = read_special_tokens(path.parent)
    if path.suffix != ".model":
        return HfTokenizer(path, special)
    if not path.with_name(CONFIG_FILE).exists():
        raise ConfigError(f"{path} needs {CONFIG_FILE} beside it: it names the special tokens.")
    return TiktokenTokenizer(path, special)


def train_bpe(texts: Iterable[str], vocab_size: int, path: str | os.PathLike[str]) -> HfTokenizer:
    """Trains a byte-level BPE and writes it as a `tokenizer.json`.

    The 256 bytes are always in the vocabulary, so every text can be encoded and decoding undoes it.
    The same texts give the same file.

    Args:
      texts: the training texts.
      vocab_size: at least 257 (the bytes and end of text); smaller texts may give fewer tokens.
      path: written at once (a reader sees the whole file or none); its folder is made.
    Raises:
      ConfigError: `vocab_size` is too small.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise ConfigError(
            f"bpe vocabulary size {vocab_size} is too small: the bytes and end of text take 257."
        )
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    hf.train_from_iterator((part for text in texts for part in _learned_parts(text)), trainer)
    write_at_once(Path(path), hf.to_str(pretty=True))
    return HfTokenizer(path)


def _learned_parts(text: str) -> Iterator[str]:
    """The text whole, or cut so that no piece of it is too long to learn from."""
    if _TOO_LONG.search(text) is None:
        yield text
    else:
        yield from _PARTS.findall(text)


def write_at_once(path: Path, text: str) -> None:
    """Writes a text file that appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise


def get_tokenizer(cfg: DataConfig, workdir: str | os.PathLike[str] | None) -> Tokenizer:
    """The tokenizer that `cfg.tokenizer` names: "byte", "bpe", or a path for `load_tokenizer`.

    "bpe" is trained once, on the training split, and kept as `workdir/tokenizer.json`: a run keeps
    its tokenizer whatever becomes of the text. Without a workdir it is trained anew and not kept.

    Raises:
      ConfigError: no such file, or the one in the workdir was trained for another `bpe_vocab_size`.
    """
    if cfg.tokenizer == "byte":
        return ByteTokenizer()
    if cfg.tokenizer != "bpe":
        if not os.path.exists(cfg.tokenizer):
            raise ConfigError(
                f"data.tokenizer={cfg.tokenizer!r} is not a file that exists. Give 'byte', 'bpe', "
                "or the path of a tokenizer.json, of a tiktoken.model, or of their folder."
            )
        return load_tokenizer(cfg.tokenizer)
    if workdir is None:
        with tempfile.TemporaryDirectory() as folder:
            return train_bpe(training_sample(cfg), cfg.bpe_vocab_size, Path(folder, CACHE_FILE))
    path = Path(workdir, CACHE_FILE)
    if not path.exists():
        return train_bpe(training_sample(cfg), cfg.bpe_vocab_size, path)
    kept = HfTokenizer(path)
    if kept.vocab_size > cfg.bpe_vocab_size:
        raise ConfigError(
            f"{path} has {kept.vocab_size} tokens, more than "
            f"data.bpe_vocab_size={cfg.bpe_vocab_size}. Set the size it has, or take "
            "another workdir."
        )
    return kept


def training_sample(cfg: DataConfig) -> tuple[str, ...]:
    """Every k-th training document, so that they hold some `_SAMPLE_BYTES`."""
    corpus = load_corpus(cfg, "train")
    step = -(-corpus.num_bytes // _SAMPLE_BYTES)
    if any(part.chat for part in corpus.parts or (corpus,)):
        texts = (
            readable(part.texts) if part.chat else part.texts for part in corpus.parts or (corpus,)
        )
        return tuple(itertools.islice(itertools.chain.from_iterable(texts), 0, None, step))
    return tuple(corpus.texts[::step])
