"""Where text comes from: every source gives named documents, in memory or where they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from moejax.config import ConfigError, DataConfig, SourceFields
from moejax.data.cache import open_cache
from moejax.data.chat import ChatRules
from moejax.data.conversations import chat_documents
from moejax.data.corpus import Corpus, LazyTexts, Reader, Split, in_split, split_hash, split_indices
from moejax.data.paths import matches
from moejax.data.records import RecordReader
from moejax.data.synthetic import synthetic_document
from moejax.data.tables import HfReader, ParquetReader, splits_of
from moejax.data.tar_shards import tar_documents
from moejax.data.text_files import TEXT_SUFFIXES, file_documents, stdlib_documents

__all__ = [
    "TEXT_SUFFIXES",
    "Corpus",
    "Split",
    "describe",
    "in_split",
    "load_corpus",
    "open_documents",
    "split_hash",
]


def load_corpus(cfg: SourceFields, split: Split) -> Corpus:
    """The documents of `split` from the configured source, or from all members of a mixture.

    Reads every document once, for the number of bytes and the hash (a cache knows both). Sources
    with random access then leave the texts where they are.

    Args:
      cfg: the data section, or one source; the fields of `SourceFields` and `mixture` are read.
      split: "train", "validation", or "all" (what is named by `paths`).
    Raises:
      ConfigError: a file is missing, unreadable or malformed, or the split holds no text.
    """
    if isinstance(cfg, DataConfig) and cfg.mixture:
        return Corpus.join([load_corpus(member, split) for member in cfg.mixture])
    if cfg.source == "cache":
        corpus = open_cache(cfg.paths, split)
    else:
        documents = open_documents(cfg, split)
        if isinstance(documents, LazyTexts):
            corpus = Corpus.from_reader(describe(cfg), documents)
        else:
            corpus = Corpus.from_documents(describe(cfg), documents)
    if cfg.source in ("chat", "webdataset"):
        corpus = dataclasses.replace(corpus, chat=ChatRules.of(cfg))
    if not len(corpus):
        raise ConfigError(
            f"data source {corpus.name} holds no text for the {split} split. Give more documents "
            "(two at least), name held-out ones (data.validation_paths), or change "
            f"data.validation_percent={cfg.validation_percent:g}."
        )
    return corpus


def describe(cfg: SourceFields) -> str:
    """The source in words, for messages."""
    with_paths = cfg.source not in ("stdlib", "synthetic")
    return f"{cfg.source} {', '.join(cfg.paths)}" if with_paths else cfg.source


def open_documents(cfg: SourceFields, split: Split) -> LazyTexts | Iterable[tuple[str, str]]:
    """A source before it is read: texts where they lie, or (name, text) pairs.

    Raises:
      ConfigError: a file is missing, damaged, or lacks the text column.
    """
    if cfg.source in ("stdlib", "synthetic"):
        read = stdlib_documents if cfg.source == "stdlib" else _synthetic
        return read(cfg, split)
    if not cfg.paths:
        raise ConfigError(
            f"data.source={cfg.source!r} needs data.paths, for example "
            f"data.paths=('{_EXAMPLES[cfg.source]}',)."
        )
    if cfg.source == "files":
        return file_documents(cfg, split)
    if cfg.source == "chat":
        return chat_documents(cfg, split)
    if cfg.source == "webdataset":
        return tar_documents(cfg, split)
    return _hf_dataset(cfg, split) if cfg.source == "hf_dataset" else _tables(cfg, split)


_EXAMPLES = {
    "files": "texts/*.txt",
    "chat": "chats/*.jsonl",
    "webdataset": "shards/*.tar",
    "parquet": "data/*.parquet",
    "hf_dataset": "saved_dataset",
    "array_record": "data/*.array_record",
}


def _synthetic(cfg: SourceFields, split: Split) -> list[tuple[str, str]]:
    """Generated documents, the same on every machine."""
    names = [f"synthetic-{i:06d}" for i in range(cfg.synthetic_docs)]
    chosen = in_split(names, str, split, cfg.validation_percent)
    return [(name, synthetic_document(int(name[-6:]))) for name in chosen]


def _tables(cfg: SourceFields, split: Split) -> LazyTexts:
    """Parquet or ArrayRecord files, the held-out ones named or chosen by hash."""

    def open_(paths: tuple[str, ...], field: str) -> Reader:
        files = matches(paths, field=f"data.{field}")
        if cfg.source == "parquet":
            return ParquetReader(files, cfg.text_field)
        return RecordReader(files, cfg.text_field, cfg.record_format)

    return _texts(cfg, split, open_)


def _texts(
    cfg: SourceFields, split: Split, open_: Callable[[tuple[str, ...], str], Reader]
) -> LazyTexts:
    if not cfg.validation_paths:
        reader = open_(cfg.paths, "paths")
        return LazyTexts(reader, split_indices(reader, split, cfg.validation_percent))
    held_out = split == "validation"
    reader = open_(
        cfg.validation_paths if held_out else cfg.paths, "validation_paths" if held_out else "paths"
    )
    return LazyTexts(reader, split_indices(reader, "all", 0.0))


def _hf_dataset(cfg: SourceFields, split: Split) -> LazyTexts:
    """Saved datasets; where each has a held-out split of its own, that is the validation split."""
    folders = matches(cfg.paths, what="folder")
    splits = {folder: splits_of(folder) for folder in folders}
    own = [folder for folder, names in splits.items() if cfg.validation_split in (names or ())]
    if own and not cfg.validation_paths and len(own) < len(folders):
        other = next(folder for folder in folders if folder not in own)
        raise ConfigError(
            f"{own[0]} has a split {cfg.validation_split!r} and {other} has none: name the "
            "held-out data with data.validation_paths, or set data.validation_split=''."
        )
    explicit = bool(own) and not cfg.validation_paths
    wanted = cfg.validation_split if explicit and split == "validation" else cfg.train_split

    def open_(paths: tuple[str, ...], field: str) -> Reader:
        found = matches(paths, what="folder", field=f"data.{field}")
        name = cfg.validation_split if field == "validation_paths" else wanted
        return HfReader(
            dict(_member(path, short, name) for path, short in found.items()), cfg.text_field
        )

    if explicit:
        reader = open_(cfg.paths, "paths")
        return LazyTexts(reader, split_indices(reader, "all", 0.0))
    return _texts(cfg, split, open_)


def _member(folder: str, name: str, split: str) -> tuple[str, str]:
    """The dataset to read in `folder`: itself, or the split of it."""
    splits = splits_of(folder)
    if splits is None:
        return folder, name
    if split not in splits:
        raise ConfigError(
            f"{folder} has no split {split!r}; it has {', '.join(splits)}. "
            "Set data.train_split or data.validation_split."
        )
    return str(Path(folder, split)), f"{name}/{split}"
