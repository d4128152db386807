"""Documents that are held in memory: the standard library's own files, the user's text files."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from moejax.config import ConfigError, SourceFields
from moejax.data.corpus import Split, in_split
from moejax.data.paths import matches

TEXT_SUFFIXES = (".txt", ".py", ".md")
# Written when an interpreter is built: they hold its paths, and would give each machine its own
# corpus.
_BUILD_FILES = ("_sysconfigdata", "config-")


def stdlib_documents(cfg: SourceFields, split: Split) -> Iterator[tuple[str, str]]:
    """The standard library's .py files that decode as UTF-8."""
    root = sysconfig.get_paths()["stdlib"]
    names = [name for name in _python_files(root) if not is_excluded(name, cfg.exclude)]
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


def is_excluded(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern stands in the path from a component on; `test/` names `tests/` too."""
    path = "/" + name
    for pattern in patterns:
        plural = pattern[:-1] + "s/" if pattern.endswith("/") else pattern
        if f"/{pattern}" in path or f"/{plural}" in path:
            return True
    return False


def file_documents(cfg: SourceFields, split: Split) -> list[tuple[str, str]]:
    """The files that `cfg.paths` name: one document a text file, one a line of .jsonl."""
    held_out = split == "validation" and cfg.validation_paths
    field, paths = ("validation_paths", cfg.validation_paths) if held_out else ("paths", cfg.paths)
    documents = [
        doc
        for path, name in matches(paths, field=f"data.{field}").items()
        for doc in _read(path, name, cfg.text_field)
    ]
    if not documents:
        raise ConfigError(f"data.{field}={paths!r} hold no text: every file is empty.")
    if cfg.validation_paths:
        return documents
    return in_split(documents, lambda doc: doc[0], split, cfg.validation_percent)


def _read(path: str, name: str, field: str) -> Iterator[tuple[str, str]]:
    """The (name, text) documents of one file."""
    suffix = os.path.splitext(path)[1]
    if suffix != ".jsonl" and suffix not in TEXT_SUFFIXES:
        hint = " Parquet files have data.source='parquet'." if suffix == ".parquet" else ""
        raise ConfigError(
            f"{path}: {suffix or 'no suffix'} is not read; use one of "
            f"{', '.join(TEXT_SUFFIXES)}, .jsonl.{hint}"
        )
    try:
        # JSON from Windows may begin with a byte-order mark; in plain text it is text.
        text = Path(path).read_bytes().decode("utf-8-sig" if suffix == ".jsonl" else "utf-8")
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
    return json_field(f"{path}, line {number}", record, field)


def json_field(where: str, record: object, field: str) -> str:
    """The text of a JSON record; ConfigError names `where`, and the fields there are."""
    if isinstance(record, dict) and isinstance(record.get(field), str):
        return record[field]
    known = ", ".join(sorted(record)) if isinstance(record, dict) else type(record).__name__
    raise ConfigError(
        f"{where}: no text in field {field!r} (it has: {known}). Set data.text_field."
    )
