"""How fast batches come from each source: `python -m moejax.data.bench [--megabytes=8]`.

Writes the same generated text in every format into a temporary folder, and takes from each: reading
and tokenising (what a run does before its first step), and batches (what it does while it trains).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from moejax.config import DataConfig
from moejax.data.build_cache import prepare
from moejax.data.packing import tokenize_corpus
from moejax.data.pipeline import make_train_iterator
from moejax.data.sources import load_corpus
from moejax.data.synthetic import synthetic_document
from moejax.data.tables import import_pyarrow
from moejax.data.tokenize import get_tokenizer


def write_formats(folder: Path, num_bytes: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Writes the text in one format after the other; yields (source, settings that read it)."""
    texts: list[str] = []
    size = 0
    while size < num_bytes:
        texts.append("".join(synthetic_document(8 * len(texts) + i) for i in range(8)))
        size += len(texts[-1])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines, encoding="utf-8")
    yield "files", {"paths": (f"{folder}/text.jsonl",)}
    pa = import_pyarrow("parquet")
    table = pa.table({"text": texts})
    pa.parquet.write_table(table, folder / "text.parquet", row_group_size=1000)
    yield "parquet", {"paths": (f"{folder}/text.parquet",)}
    saved = folder / "saved"
    saved.mkdir()
    with pa.OSFile(f"{saved}/data.arrow", "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table, max_chunksize=1000)
    (saved / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    yield "hf_dataset", {"paths": (str(saved),)}
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(f"{folder}/text.array_record", "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    yield "array_record", {"paths": (f"{folder}/text.array_record",)}


def measure(cfg: DataConfig, batches: int) -> dict[str, float]:
    """Seconds to read and tokenise, megabytes of text a second, tokens a second in batches."""
    tokenizer = get_tokenizer(cfg, None)
    began = time.perf_counter()
    corpus = load_corpus(cfg, "train")
    read_s = time.perf_counter() - began
    documents = tokenize_corpus(tokenizer, corpus)
    start_s = time.perf_counter() - began
    iterator = make_train_iterator(cfg, tokenizer, corpus, seed=0)
    next(iterator)
    began = time.perf_counter()
    for _ in range(batches):
        next(iterator)
    seconds = time.perf_counter() - began
    iterator.close()
    return {
        "read_s": read_s,
        "start_s": start_s,
        "start_mb_s": corpus.num_bytes / 1e6 / start_s,
        "tokens": len(documents.tokens),
        "batch_tokens_s": batches * cfg.batch_size * cfg.seq_len / seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line a source."""
    parser = argparse.ArgumentParser(prog="python -m moejax.data.bench", description=__doc__)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of text (default: 8)")
    parser.add_argument("--batches", type=int, default=200, help="to take (default: 200)")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        common = {
            "seq_len": options.seq_len,
            "batch_size": options.batch_size,
            "num_workers": options.workers,
            "tokenizer": str(root / "tokenizer.json"),
        }
        for source, settings in write_formats(root, int(options.megabytes * 1e6)):
            cfg = DataConfig(source=source, **settings, **common)
            if source == "files":
                get_tokenizer(cfg.replace(tokenizer="bpe"), root)
            report(source, measure(cfg, options.batches))
        prepare(cfg, root / "cache")
        cached = cfg.replace(source="cache", paths=(str(root / "cache"),))
        report("cache", measure(cached, options.batches))
    return 0


def report(source: str, figures: dict[str, float]) -> None:
    """One line of a source's figures."""
    print(
        f"{source:<13}start {figures['start_s']:6.2f} s ({figures['start_mb_s']:8.1f} MB/s, "
        f"reading {figures['read_s']:5.2f} s)   batches {figures['batch_tokens_s'] / 1e6:6.2f} M "
        f"tokens/s   {figures['tokens']:,} tokens",
        flush=True,
    )


if __name__ == "__main__":
    raise SystemExit(main())
