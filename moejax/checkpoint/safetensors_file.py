"""One safetensors file: a header checked number by number, tensors or rows of them read alone.

Own parser, because numpy cannot name the float8 types that the `safetensors` library returns, and
because a stranger's header decides what is allocated: nothing is, before every number in it agrees
with the size of the file. Reads go through `pread` into a fresh buffer; a mapped file would count
every page once touched as memory of this process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moejax.checkpoint.layout import CheckpointError

# As the reference implementation: no real header is larger (half a million keys take 60 MB).
MAX_HEADER_BYTES = 100_000_000
_MAX_RANK = 32
_MAX_BYTES = 1 << 62
_METADATA = "__metadata__"

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_), "U8": np.dtype(np.uint8), "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"), "I16": np.dtype("<i2"), "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"), "U64": np.dtype("<u8"), "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"), "F32": np.dtype("<f4"), "F64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16), "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: Any) -> str:
    """The safetensors name (`BF16`) of a numpy or jax dtype, or of such a name itself."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        return _NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        allowed = ", ".join(DTYPES)
        raise CheckpointError(f"safetensors has no type {dtype}; it has {allowed}.") from None


class TensorInfo(NamedTuple):
    """Where a tensor lies: safetensors dtype name, shape, first byte in the file, bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def shown(value: Any) -> str:
    """`value` for an error message: one short line, whatever a stranger put into it."""
    text = ascii(value)
    return text if len(text) <= 120 else text[:117] + "..."


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object in UTF-8 from a stranger; a key given twice is refused.

    Raises:
      CheckpointError: naming `where`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            names = [key for key, _ in pairs]
            twice = next(key for key in seen if names.count(key) > 1)
            raise CheckpointError(f"{where}: the key {shown(twice)} stands there twice.")
        return seen

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{where}: JSON is nested too deeply.") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not JSON: {shown(str(error))}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: a JSON object is needed, not {type(value).__name__}.")
    return value


def _counts(value: Any, where: str, what: str, limit: int) -> list[int]:
    if not isinstance(value, list) or len(value) > limit:
        raise CheckpointError(f"{where}: {what} must be a list of at most {limit} numbers.")
    for number in value:
        if type(number) is not int or not 0 <= number < _MAX_BYTES:
            raise CheckpointError(f"{where}: {what} has {shown(number)}, not a size.")
    return value


def _entry(entry: Any, where: str, data_start: int) -> TensorInfo:
    """A header entry whose offsets agree with its own dtype and shape."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs dtype, shape and data_offsets, nothing else.")
    name = entry["dtype"]
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"{where}: dtype {shown(name)} is not one of {', '.join(DTYPES)}.")
    shape = _counts(entry["shape"], where, "shape", _MAX_RANK)
    offsets = _counts(entry["data_offsets"], where, "data_offsets", 2)
    # Zeros are left out, since numpy multiplies the other dimensions of an empty array too.
    if math.prod(n or 1 for n in shape) * DTYPES[name].itemsize >= _MAX_BYTES:
        raise CheckpointError(f"{where}: shape {shown(shape)} has too many elements.")
    nbytes = math.prod(shape) * DTYPES[name].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise CheckpointError(
            f"{where}: data_offsets {shown(offsets)} do not span the {nbytes} bytes of "
            f"{name}{shown(shape)}."
        )
    return TensorInfo(name, tuple(shape), data_start + offsets[0], nbytes)


def parse_header(
    header: bytes, path: str, data_start: int, data_bytes: int
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a header; together the tensors fill the data with no hole or overlap.

    Args:
      header: the JSON.
      path: file name for messages.
      data_start: where the data begins in the file.
      data_bytes: how much data the file has.
    Raises:
      CheckpointError: anything else than that, naming file and key.
    """
    entries = parse_json(header, path)
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: {_METADATA} must map text to text.")
    tensors = {
        key: _entry(entry, f"{path}, key {shown(key)}", data_start)
        for key, entry in entries.items()
    }
    end = data_start
    for key, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            kind = "overlaps the one before it" if info.start < end else "leaves a hole before it"
            raise CheckpointError(f"{path}, key {shown(key)}: its data {kind}.")
        end += info.nbytes
        if end > data_start + data_bytes:
            raise CheckpointError(
                f"{path}, key {shown(key)}: its data ends at byte {end} and the file has "
                f"{data_start + data_bytes}: the file is cut short. Download it again."
            )
    if end != data_start + data_bytes:
        raise CheckpointError(
            f"{path}: {data_start + data_bytes - end} bytes at its end belong to no tensor."
        )
    return tensors, metadata


class SafetensorsFile:
    """The tensors of one file. Opening reads and checks the header only.

    Attributes:
      path: the file.
      tensors: name -> TensorInfo, in the order of the header.
      metadata: the file's `__metadata__`.

    Raises:
      CheckpointError: the file is missing, cut short or not what its header says.
    """

    def __init__(self, path: str | pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            fd = self._open()
            try:
                self.tensors, self.metadata = self._read_header(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}.") from error

    def _open(self) -> int:
        # O_NONBLOCK: a pipe under this name must not block; it is refused below.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError(f"{self.path} is not a file.")
        return fd

    def _read_header(self, fd: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        size = os.fstat(fd).st_size
        if size < 8:
            raise CheckpointError(f"{self.path}: {size} bytes are no safetensors file.")
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{self.path}: the header claims {length} bytes; the file has {size} and the "
                f"limit is {MAX_HEADER_BYTES}. It is cut short or no safetensors file."
            )
        header = bytes(self._pread(fd, 8, length))
        return parse_header(header, str(self.path), 8 + length, size - 8 - length)

    def _pread(self, fd: int, start: int, nbytes: int) -> np.ndarray:
        buffer = np.empty(nbytes, np.uint8)
        view, done = buffer.data, 0
        while done < nbytes:
            count = os.preadv(fd, [view[done:]], start + done)
            if count == 0:
                raise CheckpointError(f"{self.path} became shorter while it was read.")
            done += count
        return buffer

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies. Raises CheckpointError for a name the file does not have."""
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no key {shown(name)}.") from None

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, as stored."""
        info = self.info(name)
        return self._read(name, info.start, info.nbytes).data

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor in its stored dtype, or only `rows` of its first dimension.

        Args:
          name: which.
          rows: a slice of step 1, bounds as Python's; nothing else of the tensor is read.
        Raises:
          CheckpointError: no such tensor, it has no rows, or the file cannot be read.
        """
        info = self.info(name)
        shape, start, nbytes = info.shape, info.start, info.nbytes
        if rows is not None:
            if not shape or rows.step not in (None, 1):
                raise CheckpointError(
                    f"{self.path}, key {shown(name)}: no rows {rows} in shape {shape}."
                )
            first, last, _ = rows.indices(shape[0])
            row_bytes = nbytes // shape[0] if shape[0] else 0
            shape = (max(last - first, 0), *shape[1:])
            start, nbytes = start + first * row_bytes, shape[0] * row_bytes
        return self._read(name, start, nbytes).view(DTYPES[info.dtype]).reshape(shape)

    def _read(self, name: str, start: int, nbytes: int) -> np.ndarray:
        try:
            fd = self._open()
            try:
                return self._pread(fd, start, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}, key {shown(name)}: cannot be read: {error.strerror}."
            ) from error


class SafetensorsWriter:
    """Writes one file whose tensors are all known beforehand, in any order, one at a time.

    Widest types lie first, as other writers do it, so that every tensor is aligned.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        tensors: Iterable[tuple[str, Any, Sequence[int]]],
        metadata: Mapping[str, str] | None = None,
    ):
        """
        Args:
          path: a file that does not exist.
          tensors: (name, dtype, shape) of every tensor.
          metadata: text for the header; `{"format": "pt"}` when None.
        Raises:
          CheckpointError: a name given twice, a type that the format lacks, a file in the way.
        """
        self.path = pathlib.Path(path)
        plan = [(name, dtype_name(dtype), tuple(shape)) for name, dtype, shape in tensors]
        plan.sort(key=lambda entry: -DTYPES[entry[1]].itemsize)
        header: dict[str, Any] = {_METADATA: dict(metadata or {"format": "pt"})}
        end = 0
        for name, dtype, shape in plan:
            if name in header:
                raise CheckpointError(f"{self.path}: {shown(name)} is to be written twice.")
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.tensors, _ = parse_header(text, str(self.path), 8 + len(text), end)
        self._missing = set(self.tensors)
        with self._opened(os.O_CREAT | os.O_EXCL) as fd:
            _pwrite(fd, memoryview(len(text).to_bytes(8, "little") + text), 0)
            os.ftruncate(fd, 8 + len(text) + end)

    @contextlib.contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        """The file, open for one write: a folder may have more shards than a process has files."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | flags, 0o644)
            try:
                yield fd
            finally:
                os.close(fd)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be written: {error.strerror}.") from error

    def add(self, name: str, data: Any) -> None:
        """Writes a tensor.

        Args:
          name: one of the plan, not yet written.
          data: an array of the planned dtype and shape (nothing is converted), or its bytes.
        Raises:
          CheckpointError: anything else, or the disk is full.
        """
        where = f"{self.path}, key {shown(name)}"
        if name not in self._missing:
            known = "is written already" if name in self.tensors else "was not planned"
            raise CheckpointError(f"{where}: {known}.")
        info = self.tensors[name]
        if hasattr(data, "dtype"):
            array = np.asarray(data)
            if dtype_name(array.dtype) != info.dtype or array.shape != info.shape:
                raise CheckpointError(
                    f"{where}: planned as {info.dtype}{info.shape}, given {array.dtype}"
                    f"{array.shape}."
                )
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        view = np.frombuffer(data, np.uint8).data if info.nbytes else memoryview(data)
        if view.nbytes != info.nbytes:
            raise CheckpointError(f"{where}: {view.nbytes} bytes given, {info.nbytes} planned.")
        if info.nbytes:
            with self._opened() as fd:
                _pwrite(fd, view, info.start)
        self._missing.discard(name)

    def close(self) -> None:
        """Puts the file on disk. Raises CheckpointError naming the first tensor never written."""
        name = next((name for name in self.tensors if name in self._missing), None)
        if name is not None:
            raise CheckpointError(
                f"{self.path}, key {shown(name)}: never written ({len(self._missing)} of "
                f"{len(self.tensors)} are missing)."
            )
        with self._opened() as fd:
            os.fsync(fd)


def _pwrite(fd: int, view: memoryview, start: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + (1 << 30)], start + done)
