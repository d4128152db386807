"""Where text comes from: the standard library's own files, the user's files, or generated text.

Every source gives named documents. A hash of the name alone says whether a document belongs to the
training or to the validation split, so adding a document moves no other, and no name is ever in
both.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from moejax.config import ConfigError, DataConfig
from moejax.data.synthetic import synthetic_document

Split = Literal["train", "validation"]

TEXT_SUFFIXES = (".txt", ".py", ".md")
# Written when an interpreter is built: they hold its paths, and would give each machine its own
# corpus.
_BUILD_FILES = ("_sysconfigdata", "config-")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The documents of one split, in the order of their names.

    Attributes:
      name: what the source was, for messages.
      names: one name a document: its relative path, for .jsonl with `:line`.
      texts: one text a document, never empty.
      num_bytes: bytes of all texts in UTF-8.
      sha256: hash over every name and text; equal exactly when the split holds the same documents.
    """

    name: str
    names: tuple[str, ...]
    texts: tuple[str, ...]
    num_bytes: int
    sha256: str

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def from_documents(cls, name: str, documents: Iterable[tuple[str, str]]) -> Corpus:
        """A corpus of (name, text) pairs; sorts them and drops empty texts."""
        kept = sorted((doc, text) for doc, text in documents if text)
        digest, num_bytes = hashlib.sha256(), 0
        for doc, text in kept:
            data = text.encode()
            num_bytes += len(data)
            # Lengths go in as well: without them a byte could move from the name to the text
            # unseen.
            digest.update(f"{len(doc.encode())} {len(data)} {doc}".encode() + data)
        names, texts = tuple(doc for doc, _ in kept), tuple(text for _, text in kept)
        return cls(name, names, texts, num_bytes, digest.hexdigest())


def load_corpus(cfg: DataConfig, split: Split) -> Corpus:
    """The documents of `split` from the configured source.

    Args:
      cfg: the data section; `source`, `paths`, `text_field`, `exclude`, `validation_percent` and
        `synthetic_docs` are read.
      split: "train" or "validation".
    Raises:
      ConfigError: a file is missing, unreadable or malformed, or the split holds no text.
    """
    read = {"stdlib": _stdlib, "files": _files, "synthetic": _synthetic}[cfg.source]
    name = f"files {', '.join(cfg.paths)}" if cfg.source == "files" else cfg.source
    corpus = Corpus.from_documents(name, read(cfg, split))
    if not corpus.texts:
        raise ConfigError(
            f"data source {name} holds no text for the {split} split. Give more documents "
            f"(two at least), or change data.validation_percent={cfg.validation_percent:g}."
        )
    return corpus


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
    cut = sum(place < percent for place, _, _ in placed)
    if len(placed) >= 2:
        cut = min(max(cut, 1), len(placed) - 1)
    return [item for _, _, item in (placed[:cut] if split == "validation" else placed[cut:])]


def _stdlib(cfg: DataConfig, split: Split) -> Iterator[tuple[str, str]]:
    """The standard library's .py files that decode as UTF-8."""
    root = sysconfig.get_paths()["stdlib"]
    names = [name for name in _python_files(root) if not _excluded(name, cfg.exclude)]
    for name in in_split(names, str, split, cfg.validation_percent):
        try:
            yield name, Path(root, name).read_bytes().decode()
        except UnicodeDecodeError:
            continue


def _python_files(root: str) -> Iterator[str]:
    for folder, _, files in os.walk(root):
        for file in files:
            name = Path(folder, file).relative_to(root).as_posix()
            if file.endswith(".py") and not name.startswith(_BUILD_FILES):
                yield name


def _excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern stands in the path from a component on; `test/` names `tests/` too."""
    path = "/" + name
    for pattern in patterns:
        plural = pattern[:-1] + "s/" if pattern.endswith("/") else pattern
        if f"/{pattern}" in path or f"/{plural}" in path:
            return True
    return False


def _files(cfg: DataConfig, split: Split) -> list[tuple[str, str]]:
    """The files that `cfg.paths` name: one document a text file, one a line of .jsonl."""
    if not cfg.paths:
        raise ConfigError(
            "data.source='files' needs data.paths, for example data.paths=('texts/*.txt',)."
        )
    documents = [
        doc
        for path, name in _matches(cfg.paths).items()
        for doc in _read(path, name, cfg.text_field)
    ]
    if not documents:
        raise ConfigError(f"data.paths={cfg.paths!r} hold no text: every file is empty.")
    return in_split(documents, lambda doc: doc[0], split, cfg.validation_percent)


def _matches(patterns: Iterable[str]) -> dict[str, str]:
    """Path of every file that matches -> its name, the path below the pattern's fixed folder."""
    found: dict[str, str] = {}
    for pattern in patterns:
        full = os.path.expanduser(pattern)
        paths = [full] if os.path.exists(full) else sorted(glob.glob(full, recursive=True))
        paths = [path for path in paths if os.path.isfile(path)]
        if not paths:
            raise ConfigError(
                f"data.paths: {pattern!r} names no file. Give a file that exists, or a glob that "
                "matches."
            )
        root = _fixed_folder(full)
        for path in paths:
            found.setdefault(os.path.realpath(path), Path(os.path.relpath(path, root)).as_posix())
    return found


def _fixed_folder(pattern: str) -> str:
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder or "."


def _read(path: str, name: str, field: str) -> Iterator[tuple[str, str]]:
    """The (name, text) documents of one file."""
    suffix = os.path.splitext(path)[1]
    if suffix != ".jsonl" and suffix not in TEXT_SUFFIXES:
        raise ConfigError(
            f"{path}: {suffix or 'no suffix'} is not read; use one of "
            f"{', '.join(TEXT_SUFFIXES)}, .jsonl."
        )
    try:
        text = Path(path).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as UTF-8 text ({error}).") from error
    if suffix != ".jsonl":
        if text:
            yield name, text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{name}:{number}", _json_text(path, number, line, field)


def _json_text(path: str, number: int, line: str, field: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON ({error}).") from error
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        known = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(
            f"{path}, line {number}: no text in field {field!r} (the line has: {known}). "
            "Set data.text_field."
        )
    return record[field]


def _synthetic(cfg: DataConfig, split: Split) -> list[tuple[str, str]]:
    """Generated documents, the same on every machine."""
    names = [f"synthetic-{i:06d}" for i in range(cfg.synthetic_docs)]
    chosen = in_split(names, str, split, cfg.validation_percent)
    return [(name, synthetic_document(int(name[-6:]))) for name in chosen]
