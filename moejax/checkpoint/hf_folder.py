"""A Hugging Face folder, read (`HfFolder`) and written (`HfWriter`): JSON and safetensors only.

Nothing else in a folder is opened: no pickle, no Python. An index may name plain file names only
(no separators, no `..`), so it cannot point out of the folder. A file itself may be a symbolic
link, as in Hugging Face's cache, where `model.safetensors` leads to `../../blobs/<hash>`: such a
link was put there by whoever owns the disk, not by the text of an index.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.partial import free_folder, partial_folder
from moejax.checkpoint.safetensors_file import (
    DTYPES,
    SafetensorsFile,
    SafetensorsWriter,
    dtype_name,
    parse_json,
    shown,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "tokenizer.model", "vocab.json",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def read_json(path: pathlib.Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file of at most `limit` bytes; CheckpointError names the file."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist.")
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > limit:
        raise CheckpointError(f"{path} is larger than the limit of {limit} bytes.")
    return parse_json(data, str(path))


def read_index(path: pathlib.Path) -> dict[str, str]:
    """Tensor name -> file name of an index, every file name a plain one in the same folder."""
    weight_map = read_json(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{path}: weight_map must map tensor names to file names.")
    allowed: set[str] = set()
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}, key {shown(key)}: {shown(name)} is no file name.")
        if name not in allowed:
            _check_plain(name, f"{path}, key {shown(key)}")
            allowed.add(name)
    return weight_map


def _check_plain(name: str, where: str) -> None:
    plain = name.endswith(".safetensors") and name.isprintable() and name.isascii()
    if not plain or set(name) & set("/\\:") or name.startswith(".") or len(name) > 255:
        raise CheckpointError(
            f"{where}: {shown(name)} is not the plain name of a .safetensors file in this folder."
        )


class HfFolder:
    """The weights and config of a model folder. Opening reads headers only.

    Attributes:
      path: the folder.
      files: file name -> SafetensorsFile.
    """

    def __init__(self, path: str | pathlib.Path):
        """
        Args:
          path: a folder with `model.safetensors.index.json` and its shards, with
            `model.safetensors`, or with one `.safetensors` file.
        Raises:
          CheckpointError: no weights, a shard missing, cut short or corrupt, index and shards
            that do not name the same keys. The line names file and key.
        """
        self.path = pathlib.Path(path).expanduser().absolute()
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder.")
        index = self.path / INDEX
        weight_map = read_index(index) if index.is_file() else None
        names = [self._single()] if weight_map is None else sorted(set(weight_map.values()))
        for name in names:
            if not (self.path / name).exists():
                raise CheckpointError(f"{self.path / name} is missing; {INDEX} names it.")
        self.files = {name: SafetensorsFile(self.path / name) for name in names}
        self._where = {key: name for name, file in self.files.items() for key in file.tensors}
        if weight_map is not None:
            self._compare(weight_map)

    def _single(self) -> str:
        found = sorted(p.name for p in self.path.glob("*.safetensors"))
        if SINGLE in found:
            return SINGLE
        if len(found) != 1:
            raise CheckpointError(
                f"{self.path} has {len(found)} .safetensors files and no {INDEX}: it needs an "
                f"index, {SINGLE}, or one file."
            )
        return found[0]

    def _compare(self, weight_map: Mapping[str, str]) -> None:
        for key, name in weight_map.items():
            if key not in self.files[name].tensors:
                raise CheckpointError(
                    f"{self.path / name} has no key {shown(key)}; {INDEX} says it has."
                )
        for name, file in self.files.items():
            for key in file.tensors:
                if weight_map.get(key) != name:
                    raise CheckpointError(f"{file.path}, key {shown(key)}: not in {INDEX}.")

    def keys(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (safetensors dtype name, shape) of every tensor."""
        return {
            key: (info.dtype, info.shape)
            for file in self.files.values()
            for key, info in file.tensors.items()
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(i.nbytes for file in self.files.values() for i in file.tensors.values())

    def file_of(self, name: str) -> pathlib.Path:
        """The file that holds a tensor."""
        return self._file(name).path

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._where:
            raise CheckpointError(f"{self.path} has no key {shown(name)}.")
        return self.files[self._where[name]]

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor, or rows of it, in its stored dtype; see `SafetensorsFile.read`."""
        return self._file(name).read(name, rows)

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, as stored."""
        return self._file(name).raw(name)

    @property
    def config(self) -> dict[str, Any]:
        """The folder's `config.json`."""
        return read_json(self.path / "config.json", MAX_CONFIG_BYTES)

    def tokenizer_files(self) -> list[pathlib.Path]:
        """The tokenizer's files that are there (data only; a tokenizer's Python is left alone)."""
        return [p for name in _TOKENIZER_FILES if (p := self.path / name).is_file()]


def plan_shards(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], max_shard_bytes: int
) -> list[list[tuple[str, str, tuple[int, ...]]]]:
    """Tensors in the given order, a new shard whenever the next would pass the limit.

    A tensor larger than the limit has a shard of its own.
    """
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    used = 0
    for tensor in tensors:
        nbytes = math.prod(tensor[2]) * DTYPES[tensor[1]].itemsize
        if shards[-1] and used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(tensor)
        used += nbytes
    return shards


class HfWriter:
    """Writes a model folder tensor by tensor; it appears under its name only when complete.

    A context manager. Everything lies in `<out>.partial-<pid>` until the block ends well; after an
    error nothing stays. Files that are not weights (config.json, tokenizer) go into `folder`.

    Attributes:
      folder: the unfinished folder.
    """

    def __init__(
        self,
        out: str | pathlib.Path,
        tensors: Iterable[tuple[str, Any, Sequence[int]]],
        max_shard_bytes: int = 5 * 10**9,
    ):
        """
        Args:
          out: a folder that does not exist or is empty.
          tensors: (name, dtype, shape) of every tensor, in the order of the shards.
          max_shard_bytes: limit of a shard; all in one `model.safetensors` when they fit.
        Raises:
          CheckpointError: `out` is in the way, a name given twice, a type the format lacks.
        """
        self.out = free_folder(out)
        if max_shard_bytes < 1:
            raise CheckpointError(f"a shard limit of {max_shard_bytes} bytes: give 1 or more.")
        self.folder = partial_folder(self.out)
        plan = [(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in tensors]
        shards = plan_shards(plan, max_shard_bytes)
        count = len(shards)
        names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        self._shards = dict(zip([SINGLE] if count == 1 else names, shards, strict=True))
        self._where: dict[str, str] = {}
        for file, shard in self._shards.items():
            for name, _, _ in shard:
                if name in self._where:
                    raise CheckpointError(f"{self.out}: {shown(name)} is to be written twice.")
                self._where[name] = file
        self._writers: dict[str, SafetensorsWriter] = {}

    def __enter__(self) -> HfWriter:
        try:
            self.folder.mkdir(parents=True)
            for file, shard in self._shards.items():
                self._writers[file] = SafetensorsWriter(self.folder / file, shard)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made: {error.strerror}.") from error
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def add(self, name: str, data: Any) -> None:
        """Writes a planned tensor (an array of its dtype and shape, or bytes), in any order."""
        if name not in self._where:
            raise CheckpointError(f"{self.out}, key {shown(name)}: was not planned.")
        self._writers[self._where[name]].add(name, data)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Writes `value` as the folder's file `name`, indented as Hugging Face does."""
        (self.folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="ascii")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        except OSError as failure:
            raise CheckpointError(f"{self.out} cannot be written: {failure.strerror}.") from failure
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _finish(self) -> None:
        for writer in self._writers.values():
            writer.close()
        if len(self._shards) > 1:
            sizes = (i.nbytes for w in self._writers.values() for i in w.tensors.values())
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": self._where}
            self.write_json(INDEX, index)
        if self.out.is_dir():
            self.out.rmdir()
        self.folder.rename(self.out)
