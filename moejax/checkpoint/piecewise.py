"""Arrays on disk that are filled piece by piece: how they are cut, and what of them is written."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from moejax.checkpoint.layout import CheckpointError
from moejax.partitioning import ParamInfo

MAX_CHUNK_BYTES = 64 << 20

Index = tuple[int | slice, ...]
Box = tuple[tuple[int, int], ...]


def chunk_shape(
    shape: Sequence[int], itemsize: int, info: ParamInfo | None = None
) -> tuple[int, ...]:
    """Shape of the chunks of a leaf: one matrix, cut along its first dims to at most 64 MB.

    Args:
      shape: of the whole leaf.
      itemsize: bytes of an element.
      info: which dims stack layers and batch matrices (experts, gate and up); None: none do.
    """
    chunk: list[int] = list(shape)
    if info is not None:
        chunk[: info.stack] = [1] * info.stack
        if info.matrix is not None:
            whole = {dim % len(chunk) for dim in (*info.matrix, info.head_axis or -1)}
            chunk = [n if dim in whole else 1 for dim, n in enumerate(chunk)]
    for dim, n in enumerate(chunk):
        inner = math.prod(chunk[dim + 1 :]) * itemsize
        most = max(1, MAX_CHUNK_BYTES // max(inner, 1))
        if n * inner <= MAX_CHUNK_BYTES:
            break
        chunk[dim] = -(-n // -(-n // most))  # equal parts: the last file is padded to a whole one
    return tuple(max(n, 1) for n in chunk)


class PieceArray:
    """One zarr array on disk, uncompressed, and which boxes of it have been written.

    Attributes:
      shape: of the whole.
      dtype: of its elements.
      chunk: shape of the part that is one file.
      written: elements written so far.
    """

    def __init__(
        self,
        path: pathlib.Path,
        shape: Sequence[int],
        dtype: np.dtype,
        chunk: tuple[int, ...],
        context: ts.Context,
    ):
        self.shape, self.dtype, self.chunk = tuple(shape), dtype, chunk
        self.written = 0
        self._boxes: set[Box] = set()
        # numpy spells bfloat16 as bare bytes ('<V2'); zarr readers know it by its name.
        code = "bfloat16" if dtype.name == "bfloat16" else dtype.str
        metadata = {
            "shape": self.shape, "chunks": chunk, "dtype": code, "compressor": None,
            "fill_value": None, "order": "C",
        }  # fmt: skip
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(path)},
            "metadata": metadata,
            # A file for every chunk, zeros too: then a missing one is damage.
            "store_data_equal_to_fill_value": True,
        }
        self._store = ts.open(spec, create=True, context=context).result()

    @property
    def complete(self) -> bool:
        """Whether every element has been written."""
        return self.written == math.prod(self.shape)

    def claim(self, index: Index, array: np.ndarray) -> Box:
        """Bounds of the piece at `index`, which counts as written from now on.

        Raises:
          CheckpointError: `array` is not what belongs there, or the piece was written before.
        """
        if len(index) > len(self.shape):
            raise CheckpointError(f"an index of {len(index)} dims in shape {self.shape}.")
        full = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        bounds, selected = [], []
        for item, size in zip(full, self.shape, strict=True):
            if isinstance(item, slice):
                first, last, step = item.indices(size)
                selected.append(last - first)
            else:
                first, last, step = int(item), int(item) + 1, 1
            if step != 1 or not 0 <= first <= last <= size:
                raise CheckpointError(f"{item} is no index of a dim of {size}.")
            bounds.append((first, last))
        box = tuple(bounds)
        if array.shape != tuple(selected) or array.dtype != self.dtype:
            raise CheckpointError(
                f"the piece at {box} is {self.dtype}{tuple(selected)}, not "
                f"{array.dtype}{array.shape}."
            )
        if box in self._boxes:
            raise CheckpointError(f"the piece at {box} is written twice.")
        self._boxes.add(box)
        self.written += array.size
        return box

    def slabs(self, box: Box) -> Iterator[Box]:
        """The box in slabs of whole chunks: a piece larger than a chunk is sent in parts."""
        for dim, ((first, last), chunk) in enumerate(zip(box, self.chunk, strict=True)):
            starts = [first, *range((first // chunk + 1) * chunk, last, chunk)]
            if len(starts) > 1:
                for start, stop in zip(starts, [*starts[1:], last], strict=True):
                    yield from self.slabs((*box[:dim], (start, stop), *box[dim + 1 :]))
                return
        yield box

    def write(self, box: Box, values: np.ndarray) -> Any:
        """Starts writing; returns a future once `values` are copied and may be changed."""
        target = self._store[tuple(slice(first, last) for first, last in box)]
        future = target.write(values, can_reference_source_data_indefinitely=False)
        future.copy.result()
        return future
