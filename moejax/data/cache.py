"""Documents tokenised before the run: folders that `moejax data prepare` wrote.

    DIR/manifest.json               tokenizer, source, counts, the list of shards
    DIR/tokenizer.json              the tokenizer, where it is a file
    DIR/train-00000.tokens.npy      uint16 or uint32: documents end to end, each closed by eos
    DIR/train-00000.lengths.npy     uint32: tokens of each document
    DIR/train-00000.json            counts and hash of the shard, written last

Token files are memory-mapped: a run holds 8 bytes a document, whatever their length.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.data.corpus import Corpus, LazyNames, Split, reason
from moejax.data.paths import matches

MANIFEST = "manifest.json"
FORMAT = 1


class TokenShards:
    """Arrays of tokens as one long one; a mapped file that is pickled is mapped again.

    Args:
      shards: one-dimensional arrays of any integer type.
    """

    def __init__(self, shards: Sequence[np.ndarray]):
        self._shards = list(shards)
        self._ends = np.cumsum([len(shard) for shard in self._shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: slice) -> np.ndarray:
        start, stop, step = place.indices(len(self))
        assert step == 1
        pieces: list[np.ndarray] = []
        shard = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            before = int(self._ends[shard - 1]) if shard else 0
            end = min(stop, int(self._ends[shard]))
            pieces.append(np.asarray(self._shards[shard][start - before : end - before]))
            start, shard = end, shard + 1
        return np.concatenate(pieces).astype(np.int32) if pieces else np.zeros(0, np.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "shards": [str(s.filename) if isinstance(s, np.memmap) else s for s in self._shards]
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]
            [np.load(s, mmap_mode="r") if isinstance(s, str) else s for s in state["shards"]]
        )

    @property
    def parts(self) -> list[np.ndarray]:
        """The arrays."""
        return self._shards


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """The tokens of one split.

    Attributes:
      folders: where they are.
      tokenizer_sha256, tokenizer_name: of the tokenizer that made them.
      tokenizer: what `data.tokenizer` is set to, to get that tokenizer.
      tokens: of all documents, end to end.
      lengths: tokens of each document, eos counted.
    """

    folders: tuple[str, ...]
    tokenizer_sha256: str
    tokenizer_name: str
    tokenizer: str
    tokens: TokenShards
    lengths: np.ndarray

    def check(self, tokenizer: Any) -> None:
        """ConfigError when `tokenizer` is another one than the cache was made with."""
        if tokenizer.sha256 != self.tokenizer_sha256:
            use = f"Set data.tokenizer={self.tokenizer}"
            raise ConfigError(
                f"cache {', '.join(self.folders)} was made with the tokenizer "
                f"{self.tokenizer_name} ({self.tokenizer_sha256[:12]}), the run has "
                f"{tokenizer.name} ({tokenizer.sha256[:12]}). {use}, or prepare the data again."
            )


class _NoText(Sequence[str]):
    """Stands for the texts of a cache: their number is known, they are not there."""

    def __init__(self, folder: str, tokenizer: str, count: int):
        self._folder, self._tokenizer, self._count = folder, tokenizer, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place):
        raise ConfigError(
            f"cache {self._folder} holds tokens, no text to train a tokenizer on. "
            f"Set data.tokenizer={self._tokenizer}."
        )


def open_cache(patterns: Sequence[str], split: Split) -> Corpus:
    """The documents of one split in cache folders, all made with one tokenizer.

    Raises:
      ConfigError: no cache, an unfinished or damaged one, or folders of different tokenizers.
    """
    if not patterns:
        raise ConfigError("data.source='cache' needs data.paths=('FOLDER',).")
    folders = list(matches(patterns, what="folder"))
    manifests = [read_manifest(folder) for folder in folders]
    tokenizers = [manifest["tokenizer"] for manifest in manifests]
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        if tokenizer["sha256"] != tokenizers[0]["sha256"]:
            raise ConfigError(f"caches {folders[0]} and {folder} have different tokenizers.")
    names = ("train", "validation") if split == "all" else (split,)
    shards = [
        (folder, shard)
        for folder, manifest in zip(folders, manifests, strict=True)
        for name in names
        for shard in manifest["splits"][name]["shards"]
    ]
    tokens, lengths, digest = [], [np.zeros(0, np.uint32)], hashlib.sha256()
    for folder, shard in shards:
        tokens.append(_load(folder, shard, "tokens"))
        lengths.append(np.asarray(_load(folder, shard, "lengths")))
        digest.update(shard["sha256"].encode())
    cache = TokenCache(
        tuple(folders),
        tokenizers[0]["sha256"],
        tokenizers[0]["name"],
        _tokenizer_of(folders[0], tokenizers[0]),
        TokenShards(tokens),
        np.concatenate(lengths),
    )
    count = len(cache.lengths)
    num_bytes = sum(shard["bytes"] for _, shard in shards)
    label = f"cache {', '.join(patterns)}"
    document_names = LazyNames(lambda index: f"{split}:{index}", range(count))
    texts = _NoText(folders[0], cache.tokenizer, count)
    return Corpus(label, document_names, texts, num_bytes, digest.hexdigest(), cache=cache)


def _tokenizer_of(folder: str, tokenizer: dict[str, Any]) -> str:
    """The tokenizer's copy in the cache, or its name."""
    file = tokenizer.get("file")
    return str(Path(folder, os.path.basename(file))) if file else tokenizer["name"]


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The manifest of a finished cache; ConfigError says what else the folder is."""
    path = Path(folder, MANIFEST)
    if not path.is_file():
        inside = sorted(str(p.parent) for p in Path(folder).glob(f"*/{MANIFEST}"))
        hint = f" It holds the caches {', '.join(inside)}: name those." if inside else ""
        raise ConfigError(
            f"{folder} is no finished cache: it has no {MANIFEST}.{hint} "
            "`moejax data prepare` makes one, and finishes one that was interrupted."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"]
        for split in ("train", "validation"):
            for shard in manifest["splits"][split]["shards"]:
                shard["name"], shard["sha256"], int(shard["bytes"]), int(shard["tokens"])
                int(shard["documents"])
        manifest["tokenizer"]["sha256"], manifest["tokenizer"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a manifest ({type(error).__name__}: {error}).") from error
    if known != FORMAT:
        raise ConfigError(f"{path} has format {known}; only {FORMAT} is read. Prepare it again.")
    return manifest


def _load(folder: str, shard: dict[str, Any], what: str) -> np.ndarray:
    """One array of a shard, mapped; ConfigError when it is not what the manifest says."""
    name = shard["name"]
    path = Path(folder, f"{name}.{what}.npy")
    if os.path.basename(name) != name:
        raise ConfigError(f"{folder}/{MANIFEST} names {name!r}, outside of the folder.")
    count = shard["tokens" if what == "tokens" else "documents"]
    if not count:  # an empty file cannot be mapped
        return np.zeros(0, np.uint16)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(
            f"{path}: damaged or missing ({reason(error)}). Prepare it again."
        ) from error
    if array.shape != (count,) or array.dtype.kind != "u":
        raise ConfigError(
            f"{path} holds {array.shape} {array.dtype}, the manifest says {count} tokens or "
            "documents. Prepare it again."
        )
    return array
