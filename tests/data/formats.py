"""Writers of every format that is read, as the tools that people use leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from array_record.python.array_record_module import ArrayRecordWriter

from moejax.data.synthetic import synthetic_document

NUM_DOCUMENTS = 60
TEXTS = [synthetic_document(i) for i in range(NUM_DOCUMENTS)]


def write_parquet(path: Path, texts: list[Any], column: str = "text", rows: int = 7) -> None:
    """A table with an id beside the text, `rows` a row group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(texts))), column: pa.array(texts)})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def write_saved_dataset(folder: Path, texts: list[str], files: int = 2) -> None:
    """A folder as `Dataset.save_to_disk` of Hugging Face leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    size, names = -(-len(texts) // files), []
    for number in range(files):
        part = texts[number * size : (number + 1) * size]
        names.append({"filename": f"data-{number:05d}-of-{files:05d}.arrow"})
        table = pa.table({"text": part, "id": list(range(len(part)))})
        with pa.OSFile(str(folder / names[-1]["filename"]), "wb") as file:
            with pa.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table, max_chunksize=5)
    (folder / "state.json").write_text(json.dumps({"_data_files": names, "_split": None}))
    (folder / "dataset_info.json").write_text("{}")


def write_records(path: Path, records: list[str | bytes]) -> None:
    """An ArrayRecord file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record.encode() if isinstance(record, str) else record)
    writer.close()
