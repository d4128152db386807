"""Documents in ArrayRecord files: UTF-8 texts, or JSON objects with a field of text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.config import ConfigError
from moejax.data.corpus import reason
from moejax.data.text_files import json_field

# Each read fetches its own records and nothing ahead.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class RecordReader:
    """Records as documents, read one by one.

    Args:
      files: path -> name.
      field: of the text in a JSON record.
      record_format: "text", "json", or "auto": a file holds JSON when its first record is a JSON
        object.
    Raises:
      ConfigError: array_record is not installed, or a file is damaged.
    """

    def __init__(self, files: dict[str, str], field: str, record_format: str = "auto"):
        try:
            from array_record.python import array_record_module
        except ImportError as error:
            raise ConfigError(
                "data.source='array_record' needs array_record, which is not installed: "
                "pip install array_record."
            ) from error
        self._files, self._field, self._format = files, field, record_format
        self._paths, self._names = list(files), list(files.values())
        self._readers: list[Any] = []
        for path in self._paths:
            try:
                reader = array_record_module.ArrayRecordReader(path, _OPTIONS)
                if not reader.ok():
                    reader.read([0])  # says what is wrong
                self._readers.append(reader)
            except (RuntimeError, OSError, ValueError, IndexError) as error:
                raise ConfigError(
                    f"{path}: not a readable ArrayRecord file ({reason(error)})."
                ) from error
        self._ends = np.cumsum([reader.num_records() for reader in self._readers], dtype=np.int64)
        self._is_json = [self._holds_json(file) for file in range(len(self._paths))]

    def __reduce__(self) -> tuple:
        return RecordReader, (self._files, self._field, self._format)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _locate(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, side="right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    def name(self, index: int) -> str:
        file, place = self._locate(index)
        return f"{self._names[file]}:{place}"

    def texts(self, indices: Sequence[int]) -> list[str]:
        return [self._text(*self._locate(index)) for index in indices]

    def _text(self, file: int, place: int) -> str:
        where = f"{self._paths[file]}, record {place}"
        try:
            text = self._record(file, place).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where}: not UTF-8 text ({error}).") from error
        if not self._is_json[file]:
            return text
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{where}: not JSON ({error}). Or data.record_format='text'?"
            ) from error
        return json_field(where, record, self._field)

    def _record(self, file: int, place: int) -> bytes:
        try:
            return self._readers[file].read([place])[0]
        except (RuntimeError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{self._paths[file]}: record {place} is damaged ({reason(error)})."
            ) from error

    def _holds_json(self, file: int) -> bool:
        if self._format != "auto" or not self._readers[file].num_records():
            return self._format == "json"
        first = self._record(file, 0)
        try:
            return first.lstrip()[:1] == b"{" and isinstance(json.loads(first), dict)
        except ValueError:
            return False
