"""Tokenises sources into caches: in parallel, shard by shard, so that a second call goes on.

A shard is a run of documents in the source's order. Its arrays are written under other names and
renamed, its counts last: a shard with counts is whole. The manifest, written when all shards are
there, is what makes the folder a cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shutil
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import ConfigError, DataConfig, SourceFields
from moejax.data.cache import FORMAT, MANIFEST
from moejax.data.corpus import Split, add_document
from moejax.data.packing import token_dtype
from moejax.data.report import Progress, Report, Totals
from moejax.data.shards import Shard, SplitTexts, make_shard, start_worker, work, write_json
from moejax.data.sources import describe
from moejax.data.tokenize import Tokenizer, get_tokenizer

PLAN, TOKENIZER = "plan.json", "tokenizer.json"
SPLITS: tuple[Split, ...] = ("train", "validation")
# A source is cut into so many shards, enough for many processes and for an interruption to lose
# little, unless they would hold less or more than these bytes of text.
_SHARDS = 64
_SHARD_BYTES = (1 << 20, 64 << 20)


def prepare(
    cfg: DataConfig,
    out: str | os.PathLike[str],
    *,
    workers: int = 0,
    shard_bytes: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Report]:
    """Tokenises the source of `cfg`, or every member of its mixture, into `out`.

    What an earlier call left there is kept: whole shards are not made again. A mixture gets a
    folder a member, and `mixture.json`, which `data.mixture` takes.

    Args:
      cfg: the source fields, `mixture` and the tokenizer ("bpe" is trained, and kept in `out`).
      out: folder of the cache; made if missing.
      workers: processes; 0 = none but this one.
      shard_bytes: about how much text goes into a shard; 0 = by the size of the source.
      progress: called with (bytes done, bytes of all), both of text; the latter is an estimate.
    Returns:
      One report a source.
    Raises:
      ConfigError: the data cannot be read, or `out` holds the cache of other data.
    """
    out = Path(out)
    sources = {member.name: member for member in cfg.mixture} or {"": cfg}
    caches = [name for name, source in sources.items() if source.source == "cache"]
    if caches:
        where = f" (mixture {caches[0]})" if caches[0] else ""
        raise ConfigError(
            f"data.source='cache'{where} is tokenised already: there is nothing to prepare."
        )
    whole = [s.source for s in sources.values() if s.source in ("chat", "webdataset")]
    if whole:
        raise ConfigError(
            f"data.source={whole[0]!r} has no cache: conversations are rendered when a run begins."
        )
    opened = {
        name: {split: SplitTexts.of(source, split) for split in SPLITS}
        for name, source in sources.items()
    }
    for name, splits in opened.items():
        if not len(splits["train"].texts):
            raise ConfigError(f"data source {describe(sources[name])} holds no document.")
    tokenizer = get_tokenizer(cfg, out)
    out.mkdir(parents=True, exist_ok=True)
    totals = Totals(progress)
    plans = [
        _plan(source, opened[name], out / name, tokenizer, shard_bytes, totals)
        for name, source in sources.items()
    ]
    done = [_missing_work(plan, totals) for plan in plans]
    work_left = [shards for _, shards in done]
    _make_shards(cfg, out, sources, opened, work_left, tokenizer, workers, totals)
    reports = [
        _finish(name or describe(cfg), sources[name], plan, tokenizer, out / name, reused)
        for name, plan, (reused, _) in zip(sources, plans, done, strict=True)
    ]
    if cfg.mixture:
        write_json(out / "mixture.json", _as_mixture(cfg, out))
    return reports


def _plan(
    cfg: SourceFields,
    splits: dict[Split, SplitTexts],
    folder: Path,
    tokenizer: Tokenizer,
    shard_bytes: int,
    totals: Totals,
) -> list[Shard]:
    """The shards of one source; the same again for the same data, or ConfigError."""
    mean = {split: splits[split].mean_bytes() for split in SPLITS}
    total = sum(mean[split] * len(splits[split].texts) for split in SPLITS)
    totals.expect(total)
    shard_bytes = shard_bytes or int(np.clip(total / _SHARDS, *_SHARD_BYTES))
    shards = []
    for split in SPLITS:
        count = len(splits[split].texts)
        size = max(1, int(shard_bytes / max(mean[split], 1.0)))
        for number, start in enumerate(range(0, count, size)):
            shards.append(Shard(str(folder), split, number, start, min(count, start + size)))
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        "format": FORMAT,
        "source": _source_fields(cfg),
        "tokenizer": tokenizer.sha256,
        "documents": {split: len(splits[split].texts) for split in SPLITS},
        "first": {split: _first(splits[split]) for split in SPLITS},
        "shards": [(shard.name, shard.start, shard.stop) for shard in shards],
    }
    identity = json.loads(json.dumps(identity))
    path = folder / PLAN
    before = _read_plan(path)
    differs = [key for key in identity if before and before.get(key) != identity[key]]
    if differs:
        raise ConfigError(
            f"{folder} holds a cache of other data (another {differs[0]}). Take another --out, "
            "or delete it."
        )
    write_json(path, identity)
    return shards


def _read_plan(path: Path) -> dict[str, Any]:
    """What an earlier call meant to make here; empty where there was none."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return plan if isinstance(plan, dict) else {}


def _source_fields(cfg: SourceFields) -> dict[str, Any]:
    """What decides the documents of a source; what only conversations have is left out."""
    chat = ("train_on", "too_long", "chat_template")
    fields = (field.name for field in dataclasses.fields(SourceFields) if field.name not in chat)
    return {name: getattr(cfg, name) for name in fields}


def _first(texts: SplitTexts) -> str:
    """A mark of a split's content: names and texts of a few documents, as a hash."""
    digest = hashlib.sha256()
    step = max(1, len(texts.texts) // 8)
    for place in range(0, len(texts.texts), step):
        add_document(digest, texts.names[place], texts.texts[place])
    return digest.hexdigest()[:16]


def _missing_work(plan: list[Shard], totals: Totals) -> tuple[int, list[Shard]]:
    """(number of whole shards, those to make)."""
    missing = []
    for shard in plan:
        facts = shard.facts()
        if facts is None:
            missing.append(shard)
        else:
            totals.add(facts["bytes"])
    return len(plan) - len(missing), missing


def _make_shards(
    cfg: DataConfig,
    out: Path,
    sources: dict[str, SourceFields],
    opened: dict[str, dict[Split, SplitTexts]],
    missing: list[list[Shard]],
    tokenizer: Tokenizer,
    workers: int,
    totals: Totals,
) -> None:
    """Makes the missing shards of each source, in this process or in workers."""
    tasks = [(number, shard) for number, shards in enumerate(missing) for shard in shards]
    if workers < 2 or len(tasks) < 2:
        texts = list(opened.values())
        for number, shard in tasks:
            make_shard(shard, texts[number][shard.split], tokenizer, totals.add)
        return
    # A worker reads the tokenizer that was trained here.
    spec = cfg.replace(tokenizer=str(out / TOKENIZER)) if cfg.tokenizer == "bpe" else cfg
    with ProcessPoolExecutor(
        min(workers, len(tasks)),
        # Threads of this process (JAX, Grain) do not survive a fork.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=start_worker,
        initargs=(spec, list(sources.values())),
    ) as pool:
        running: set[Future] = {pool.submit(work, number, shard) for number, shard in tasks}
        try:
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    totals.add(future.result())
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process was killed, most often for want of memory; the same call goes "
                "on from here. Give fewer --workers."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _finish(
    name: str,
    cfg: SourceFields,
    plan: list[Shard],
    tokenizer: Tokenizer,
    folder: Path,
    reused: int,
) -> Report:
    """Writes the manifest, and the tokenizer where it is a file."""
    kept = _keep_tokenizer(tokenizer, folder)
    splits: dict[str, dict[str, Any]] = {}
    for split in SPLITS:
        shards = [shard.facts() for shard in plan if shard.split == split]
        counts = {k: sum(s[k] for s in shards if s) for k in ("documents", "tokens", "bytes")}
        splits[split] = counts | {"shards": shards}
    manifest = {
        "format": FORMAT,
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "file": kept,
        },
        "dtype": np.dtype(token_dtype(tokenizer.vocab_size)).name,
        "source": _source_fields(cfg),
        "splits": splits,
    }
    write_json(folder / MANIFEST, manifest)
    for partial in folder.glob(".*.[0-9]*"):  # of a call that was killed while it wrote
        partial.unlink(missing_ok=True)
    counts = {split: {k: v for k, v in s.items() if k != "shards"} for split, s in splits.items()}
    sums = {k: sum(c[k] for c in counts.values()) for k in ("documents", "tokens", "bytes")}
    return Report(name, str(folder), **sums, splits=counts, reused=reused)


def _keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> str | None:
    """Copies the tokenizer's file, and those that name its special tokens. Returns its name."""
    path = Path(tokenizer.name)
    if not path.is_file():
        return None
    for name in (path.name, "tokenizer_config.json", "generation_config.json"):
        with contextlib.suppress(shutil.SameFileError, FileNotFoundError):
            shutil.copyfile(path.with_name(name), folder / name)
    return path.name


def _as_mixture(cfg: DataConfig, out: Path) -> list[dict[str, Any]]:
    """What `data.mixture` takes to read the caches with the same weights."""
    return [
        {"name": m.name, "source": "cache", "paths": [str(out / m.name)], "weight": m.weight}
        for m in cfg.mixture
    ]
