"""Config sections of text: where it comes from, how it becomes rows, what is evaluated."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from moejax.config.fields import ConfigError, Section, section_entries, setting
from moejax.config.vision import MERGE

GROUP = MERGE * MERGE  # patches that become one token

SOURCES = (
    "stdlib", "files", "chat", "synthetic", "parquet", "hf_dataset", "array_record", "cache",
    "webdataset",
)  # fmt: skip
IMAGE_STYLES = ("auto", "kimi_k3", "kimi_k25", "kimi_vl", "bare")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceFields(Section):
    """Where the documents of one source come from, and which of them are held out."""

    source: str = setting("stdlib", choices=SOURCES)
    paths: tuple = setting((), items=str)
    text_field: str = setting("text")
    record_format: str = setting("auto", choices=("auto", "text", "json"))
    exclude: tuple = setting(("test/", "site-packages/"), items=str)
    validation_percent: float = setting(5.0, gt=0.0, lt=100.0)
    validation_paths: tuple = setting((), items=str)
    train_split: str = setting("train")
    validation_split: str = setting("validation")
    synthetic_docs: int = setting(1000, ge=1)
    train_on: str = setting("completion", choices=("completion", "last", "all"))
    too_long: str = setting("drop", choices=("drop", "truncate"))
    chat_template: str = setting("")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(SourceFields):
    """One member of a mixture, or one evaluation set: a source with a name."""

    _path = "source."
    name: str = setting("")
    weight: float = setting(1.0, gt=0.0)
    split: str = setting("all", choices=("all", "train", "validation"))
    source: str = setting("files", choices=SOURCES)


def _named(field: str, sources: Any) -> tuple:
    """The sources, each with a name of its own that can be a folder's."""
    named = tuple(
        source if source.name else source.replace(name=f"{source.source}-{place}")
        for place, source in enumerate(section_entries(SourceConfig, sources, field))
    )
    names = [source.name for source in named]
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name):
            raise ConfigError(
                f"{field}: the name {name!r} is not allowed: use letters, digits, '.', '_', '-'."
            )
        if names.count(name) > 1:
            raise ConfigError(f"{field} has {names.count(name)} entries called {name!r}.")
    return named


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(SourceFields):
    """Where text comes from and how it becomes rows of tokens."""

    _path = "data."
    mixture: tuple = setting((), section=SourceConfig)
    epochs: int = setting(0, ge=0)
    shuffle_seed: int = setting(-1, ge=-1, lt=2**31)
    tokenizer: str = setting("bpe")
    bpe_vocab_size: int = setting(512, ge=258)
    seq_len: int = setting(512, ge=2)
    batch_size: int = setting(16, ge=1)
    image_patches: int = setting(0, ge=0)
    image_style: str = setting("auto", choices=IMAGE_STYLES)
    num_workers: int = setting(0, ge=0, le=64)
    prefetch: int = setting(4, ge=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixture", _named("data.mixture", self.mixture))
        if self.image_patches % GROUP:
            up = self.image_patches + -self.image_patches % GROUP
            raise ConfigError(
                f"data.image_patches={self.image_patches} is no multiple of {GROUP}: so many "
                f"patches become one token. Use {up - GROUP} or {up}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Evaluation on the validation split."""

    _path = "eval."
    every: int = setting(100, ge=0)
    batches: int = setting(0, ge=0)
    batch_size: int = setting(0, ge=0)
    sets: tuple = setting((), section=SourceConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "sets", _named("eval.sets", self.sets))
