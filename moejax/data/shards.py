"""One shard of a token cache: the documents it holds, and how it is made and written."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import DataConfig, SourceFields
from moejax.data.corpus import CHUNK, Corpus, LazyNames, LazyTexts, Split, add_document
from moejax.data.packing import token_dtype
from moejax.data.sources import describe, open_documents
from moejax.data.tokenize import Tokenizer, get_tokenizer

# Documents whose length tells that of all.
_SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class SplitTexts:
    """The documents of one split, before anything was read where that can wait."""

    names: Sequence[str]
    texts: Sequence[str]

    @classmethod
    def of(cls, cfg: SourceFields, split: Split) -> SplitTexts:
        documents = open_documents(cfg, split)
        if isinstance(documents, LazyTexts):
            return cls(LazyNames(documents.reader.name, documents.indices), documents)
        corpus = Corpus.from_documents(describe(cfg), documents)
        return cls(corpus.names, corpus.texts)

    def mean_bytes(self) -> float:
        """Bytes of a text, from a few that lie evenly."""
        step = max(1, len(self.texts) // _SAMPLE)
        sample = [self.texts[place] for place in range(0, len(self.texts), step)]
        return sum(len(text.encode()) for text in sample) / max(len(sample), 1)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Documents [start, stop) of a split, and where they go."""

    folder: str
    split: Split
    number: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"

    def path(self, what: str) -> Path:
        return Path(self.folder, f"{self.name}.{what}")

    def facts(self) -> dict[str, Any] | None:
        """What a finished shard holds, None where there is none."""
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads(self.path("json").read_text(encoding="utf-8"))
            if self.path("tokens.npy").is_file() and self.path("lengths.npy").is_file():
                return facts
        return None


def make_shard(
    shard: Shard, source: SplitTexts, tokenizer: Tokenizer, told: Callable[[float], None]
) -> int:
    """Tokenises and writes one shard. Returns the bytes of its text."""
    digest, num_bytes = hashlib.sha256(), 0
    tokens: list[np.ndarray] = []
    lengths: list[int] = []
    dtype = token_dtype(tokenizer.vocab_size)
    eos = np.array([tokenizer.eos_id], dtype)
    for start in range(shard.start, shard.stop, CHUNK):
        stop = min(start + CHUNK, shard.stop)
        names, texts = source.names[start:stop], source.texts[start:stop]
        kept = [(name, text) for name, text in zip(names, texts, strict=True) if text]
        here = sum(add_document(digest, name, text) for name, text in kept)
        for ids in tokenizer.encode_batch([text for _, text in kept]):
            tokens += [ids.astype(dtype), eos]
            lengths.append(len(ids) + 1)
        num_bytes += here
        told(here)
    joined = np.concatenate(tokens) if tokens else np.zeros(0, dtype)
    write_array(shard.path("tokens.npy"), joined)
    write_array(shard.path("lengths.npy"), np.asarray(lengths, np.uint32))
    facts = {
        "name": shard.name,
        "documents": len(lengths),
        "tokens": len(joined),
        "bytes": num_bytes,
        "sha256": digest.hexdigest(),
    }
    write_json(shard.path("json"), facts)
    return num_bytes


_WORKER: dict[str, Any] = {}


def start_worker(spec: DataConfig, sources: list[SourceFields]) -> None:
    """Once a process: its tokenizer; sources are opened when a shard wants them."""
    # Ctrl-C is for the first process, which lets the shards in work be finished.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processes are the parallelism; threads on top would only wait for each other.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _WORKER.update(tokenizer=get_tokenizer(spec, None), sources=sources, texts={})


def work(number: int, shard: Shard) -> int:
    """Makes a shard in a worker. Returns the bytes of its text."""
    texts = _WORKER["texts"]
    if (number, shard.split) not in texts:
        texts[number, shard.split] = SplitTexts.of(_WORKER["sources"][number], shard.split)
    return make_shard(shard, texts[number, shard.split], _WORKER["tokenizer"], lambda _: None)


def write_array(path: Path, array: np.ndarray) -> None:
    with _replacing(path) as partial, open(partial, "wb") as file:
        np.save(file, array, allow_pickle=False)


def write_json(path: Path, value: Any) -> None:
    with _replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place when it is whole."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
