"""Text columns of Parquet files and of folders that Hugging Face `datasets` saved.

Both are read with pyarrow alone; no code that lies beside the data is run.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.data.corpus import reason

# Row groups kept decoded: reading in order touches one at a time, splits and shuffles a few.
_KEPT_GROUPS = 2


def import_pyarrow(source: str) -> Any:
    """The module pyarrow, with `parquet` and `ipc` loaded.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"data.source={source!r} needs pyarrow, which is not installed: "
            "pip install 'moejax[data]'."
        ) from error
    return pyarrow


def check_text_column(where: str, schema: Any, column: str) -> None:
    """ConfigError when a table has no such column (names those it has), or it holds no text."""
    if column not in schema.names:
        raise ConfigError(
            f"{where} has no column {column!r}; it has {', '.join(schema.names) or 'none'}. "
            "Set data.text_field."
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        texts = [f.name for f in schema if str(f.type) in ("string", "large_string", "string_view")]
        raise ConfigError(
            f"{where}: column {column!r} holds {kind}, no text; columns of text: "
            f"{', '.join(texts) or 'none'}. Set data.text_field."
        )


class ParquetReader:
    """Rows of Parquet files as documents; a row is read with its row group, which is kept a while.

    Args:
      files: path -> name.
      column: of the text.
    Raises:
      ConfigError: a file is damaged, or lacks the column.
    """

    def __init__(self, files: dict[str, str], column: str):
        self._files, self._column = files, column
        self._pyarrow = import_pyarrow("parquet")
        self._paths = list(files)
        self._names = list(files.values())
        groups = [self._rows_of_groups(path) for path in self._paths]
        self._file_ends = np.cumsum([sum(rows) for rows in groups], dtype=np.int64)
        # Row groups of all files in a line: where each ends, and which file and group it is.
        self._group_ends = np.cumsum([n for rows in groups for n in rows], dtype=np.int64)
        self._groups = [(file, g) for file, rows in enumerate(groups) for g in range(len(rows))]
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def _rows_of_groups(self, path: str) -> list[int]:
        try:
            with self._pyarrow.parquet.ParquetFile(path) as file:
                check_text_column(path, file.schema_arrow, self._column)
                meta = file.metadata
                return [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
        except (self._pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: not a readable Parquet file ({reason(error)}).") from error

    def __reduce__(self) -> tuple:
        return ParquetReader, (self._files, self._column)

    def __len__(self) -> int:
        return int(self._group_ends[-1]) if len(self._group_ends) else 0

    def name(self, index: int) -> str:
        file = int(np.searchsorted(self._file_ends, index, side="right"))
        before = int(self._file_ends[file - 1]) if file else 0
        return f"{self._names[file]}:{index - before}"

    def texts(self, indices: Sequence[int]) -> list[str]:
        groups = np.searchsorted(self._group_ends, indices, side="right").tolist()
        found = []
        for index, group in zip(indices, groups, strict=True):
            start = int(self._group_ends[group - 1]) if group else 0
            found.append(self._group(group)[index - start].as_py() or "")
        return found

    def _group(self, group: int) -> Any:
        """The text column of a row group."""
        if group not in self._kept:
            file, place = self._groups[group]
            path = self._paths[file]
            try:
                with self._pyarrow.parquet.ParquetFile(path, memory_map=True) as opened:
                    table = opened.read_row_group(place, columns=[self._column])
                self._kept[group] = table.column(0).combine_chunks()
            except (self._pyarrow.ArrowException, OSError) as error:
                raise ConfigError(
                    f"{path}: row group {place} is damaged ({reason(error)})."
                ) from error
            while len(self._kept) > _KEPT_GROUPS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]


class HfReader:
    """Rows of saved datasets as documents, out of memory-mapped Arrow files.

    Args:
      folders: path of a folder with state.json -> name.
      column: of the text.
    Raises:
      ConfigError: a file is missing or damaged, or lacks the column.
    """

    def __init__(self, folders: dict[str, str], column: str):
        self._folders, self._column = folders, column
        self._pyarrow = import_pyarrow("hf_dataset")
        self._names = list(folders.values())
        self._chunks: list[Any] = []
        chunk_rows, folder_rows = [], []
        for folder in folders:
            chunks = [chunk for path in data_files(folder) for chunk in self._open(path)]
            self._chunks += chunks
            chunk_rows += [len(chunk) for chunk in chunks]
            folder_rows.append(sum(map(len, chunks)))
        self._chunk_ends = np.cumsum(chunk_rows, dtype=np.int64)
        self._folder_ends = np.cumsum(folder_rows, dtype=np.int64)

    def _open(self, path: Path) -> list[Any]:
        """The text column of one file, in the pieces it was written in; nothing is copied."""
        pa = self._pyarrow
        try:
            mapped = pa.memory_map(str(path))
            magic = mapped.read(6)
            mapped.seek(0)
            is_file = magic == b"ARROW1"
            opened = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
            check_text_column(str(path), opened.schema, self._column)
            return opened.read_all().column(self._column).chunks
        except (pa.ArrowException, OSError) as error:
            raise ConfigError(f"{path}: not a readable Arrow file ({reason(error)}).") from error

    def __reduce__(self) -> tuple:
        return HfReader, (self._folders, self._column)

    def __len__(self) -> int:
        return int(self._chunk_ends[-1]) if len(self._chunk_ends) else 0

    def name(self, index: int) -> str:
        folder = int(np.searchsorted(self._folder_ends, index, side="right"))
        before = int(self._folder_ends[folder - 1]) if folder else 0
        return f"{self._names[folder]}:{index - before}"

    def texts(self, indices: Sequence[int]) -> list[str]:
        chunks = np.searchsorted(self._chunk_ends, indices, side="right").tolist()
        found = []
        for index, chunk in zip(indices, chunks, strict=True):
            start = int(self._chunk_ends[chunk - 1]) if chunk else 0
            try:
                found.append(self._chunks[chunk][index - start].as_py() or "")
            except (self._pyarrow.ArrowException, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.name(index)}: damaged text ({reason(error)}).") from error
        return found


def data_files(folder: str) -> list[Path]:
    """The Arrow files that a saved dataset's state.json lists, all inside the folder."""
    state = _json(Path(folder, "state.json"))
    if state.get("_indices_data_files"):
        raise ConfigError(
            f"{folder} is a selection of another dataset (an old format): save it again with "
            "datasets.load_from_disk(...).flatten_indices().save_to_disk(...)."
        )
    listed = state.get("_data_files")
    if not isinstance(listed, list) or not all(isinstance(file, dict) for file in listed):
        raise ConfigError(f"{folder}/state.json lists no data files.")
    names = [str(file.get("filename", "")) for file in listed]
    for name in names:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ConfigError(f"{folder}/state.json names {name!r}, outside of the folder.")
        if not Path(folder, name).is_file():
            raise ConfigError(f"{Path(folder, name)} is missing; state.json lists it.")
    return [Path(folder, name) for name in names]


def splits_of(folder: str) -> list[str] | None:
    """Names of the splits of a folder that holds several datasets; None where it is one dataset.

    Raises:
      ConfigError: it is neither.
    """
    if Path(folder, "state.json").is_file():
        return None
    index = Path(folder, "dataset_dict.json")
    if not index.is_file():
        raise ConfigError(
            f"{folder} is no saved dataset: it has no state.json and no dataset_dict.json. "
            "Write one with Dataset.save_to_disk(...)."
        )
    splits = _json(index).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise ConfigError(f"{index} lists no splits.")
    for name in splits:
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise ConfigError(f"{index} names {name!r}, outside of the folder.")
    return splits


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({reason(error)}).") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not an object.")
    return value
