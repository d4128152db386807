"""A checkpoint written piece by piece: weights larger than memory, no leaf of them ever whole.

The step reads back like one that a run saved (`manager.py`). Its arrays lie in Orbax's layout of
one zarr array per leaf, which any number of small writes can fill; Orbax itself writes only arrays
it is handed whole. A chunk is one matrix of one layer (of one expert), so that a piece is a file
and a mesh reads the files of its own layers and experts.
"""

from __future__ import annotations

import collections
import json
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from moejax.checkpoint import integrity, layout
from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.piecewise import Box, Index, PieceArray, chunk_shape
from moejax.checkpoint.safetensors_file import SafetensorsFile, SafetensorsWriter, shown
from moejax.partitioning import ParamInfo
from moejax.typing import PyTree

MAX_PENDING_BYTES = 64 << 20
_CARRIED = pathlib.Path("carried") / "carried.safetensors"
_DICT_KEY = 2  # Orbax's number for a key of a dictionary


class StreamedCheckpoint:
    """Writes step `step` of `workdir` by pieces; it exists only once the block ends well.

    A context manager. Memory holds one piece and up to 64 MB still on their way to the disk.
    After an error nothing stays.
    """

    def __init__(
        self,
        workdir: str | pathlib.Path,
        abstract: Mapping[str, PyTree],
        *,
        config: Mapping[str, Any],
        infos: PyTree | None = None,
        step: int = 0,
        carried: Iterable[tuple[str, Any, Sequence[int]]] = (),
    ):
        """
        Args:
          workdir: the folder that is to hold `checkpoints/<step>`.
          abstract: {"params": ..., "balance": ..., other parts of a state}: pytrees of
            jax.ShapeDtypeStruct.
          config: resolved config of a run, as nested dictionaries.
          infos: ParamInfo of every parameter (`ModelParts.infos`); chunks follow it.
          step: number of the step.
          carried: (name, dtype, shape) of tensors that no model has, kept beside it for export.
        Raises:
          CheckpointError: the step exists.
        """
        self.directory = layout.checkpoints_dir(workdir)
        self.path = self.directory / str(step)
        if self.path.exists():
            raise CheckpointError(f"{self.path} exists: name another folder, or delete it.")
        self._folder = self.directory / f"{step}.partial-{os.getpid()}"
        self._abstract = abstract
        self._meta = {
            "format_version": layout.FORMAT_VERSION,
            "step": step,
            "config": layout.to_json(config),
            "position": {},
            "metrics": {},
            "leaves": layout.describe(abstract),
        }
        flat = layout.named_leaves({} if infos is None else infos)
        self._infos: dict[str, ParamInfo] = {f"params/{name}": x for name, x in flat.items()}
        self._carried_plan = list(carried)
        self._carried: SafetensorsWriter | None = None
        self._leaves: dict[str, PieceArray] = {}
        self._pending: collections.deque[tuple[Any, int]] = collections.deque()
        self._pending_bytes = 0
        self._made: list[pathlib.Path] = []

    def __enter__(self) -> StreamedCheckpoint:
        try:
            self._create()
        except BaseException as error:
            self._discard()
            raise self._plain(error) from error
        return self

    def _create(self) -> None:
        missing = [p for p in (self._folder, *self._folder.parents) if not p.exists()]
        self._folder.mkdir(parents=True)
        self._made = missing
        # No cache: a chunk leaves memory once it is written.
        context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
        for name, leaf in layout.named_leaves(self._abstract).items():
            dtype = np.dtype(leaf.dtype)
            chunk = chunk_shape(leaf.shape, dtype.itemsize, self._infos.get(name))
            item, inner = _item_of(name)
            path = self._folder / item / inner.replace("/", ".")
            self._leaves[name] = PieceArray(path, leaf.shape, dtype, chunk, context)
        if self._carried_plan:
            path = self._folder / _CARRIED
            path.parent.mkdir()
            self._carried = SafetensorsWriter(path, self._carried_plan)

    def write(self, name: str, index: Index, array: Any) -> None:
        """Writes one piece of a leaf. The array may be changed as soon as this returns.

        Args:
          name: of the leaf, as `params/embed/table`.
          index: integers and slices of step 1 for its leading dims; () is all of it.
          array: of the leaf's dtype and of the shape that `index` selects; not converted.
        Raises:
          CheckpointError: no such leaf, another shape or dtype, a piece written before, or the
            disk cannot take it.
        """
        if name not in self._leaves:
            raise CheckpointError(f"checkpoint {self.path}: there is no leaf {shown(name)}.")
        leaf, array = self._leaves[name], np.asarray(array)
        try:
            box = leaf.claim(index, array)
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {self.path}, {name}: {error}") from None
        values = array.reshape([last - first for first, last in box])
        for slab in leaf.slabs(box):
            inside = tuple(
                slice(first - start, last - start)
                for (first, last), (start, _) in zip(slab, box, strict=True)
            )
            self._send(leaf, slab, values[inside])

    def _send(self, leaf: PieceArray, slab: Box, values: np.ndarray) -> None:
        while self._pending and self._pending_bytes + values.nbytes > MAX_PENDING_BYTES:
            self._wait_for_one()
        try:
            future = leaf.write(slab, values)
        except (OSError, ValueError) as error:
            raise self._plain(error) from error
        self._pending.append((future, values.nbytes))
        self._pending_bytes += values.nbytes

    def _wait_for_one(self) -> None:
        future, nbytes = self._pending[0]
        try:
            future.result()
        except (OSError, ValueError) as error:
            raise self._plain(error) from error
        self._pending.popleft()
        self._pending_bytes -= nbytes

    def carry(self, name: str, data: Any) -> None:
        """Writes a planned tensor that no model has: an array, or its bytes."""
        if self._carried is None:
            raise CheckpointError(f"checkpoint {self.path}: nothing to carry was planned.")
        self._carried.add(name, data)

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
            raise self._plain(failure) from failure
        finally:
            self._discard()

    def _finish(self) -> None:
        while self._pending:
            self._wait_for_one()
        for name, leaf in self._leaves.items():
            if not leaf.complete:
                raise CheckpointError(
                    f"checkpoint {self.path}, {name}: {leaf.written} of {math.prod(leaf.shape)} "
                    "elements were written."
                )
        if self._carried is not None:
            self._carried.close()
        self._describe_items()
        with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as orbax:
            orbax.save(self._folder / "meta", args=ocp.args.JsonSave(self._meta))
        integrity.write_checksums(self._folder)
        self._folder.rename(self.path)
        self._made = []

    def _describe_items(self) -> None:
        """Writes what Orbax reads of a tree before its arrays: its keys, and how they lie."""
        trees: dict[str, dict[str, Any]] = {}
        for name in self._leaves:
            item, inner = _item_of(name)
            keys = inner.split("/")
            trees.setdefault(item, {})[str(tuple(keys))] = {
                "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
            }
        for item, tree in trees.items():
            text = json.dumps(
                {
                    "tree_metadata": tree,
                    "use_ocdbt": False,
                    "use_zarr3": False,
                    "store_array_data_equal_to_fill_value": True,
                    "custom_metadata": None,
                }
            )
            (self._folder / item / "_METADATA").write_text(text)

    def _discard(self) -> None:
        """Removes what is unfinished, folders made for it included; nothing after success."""
        for future, _ in self._pending:
            future.exception()  # waits: a write still under way would make its file anew
        self._pending.clear()
        self._leaves.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def _plain(self, error: BaseException) -> BaseException:
        if isinstance(error, CheckpointError) or not isinstance(error, OSError | ValueError):
            return error
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        return CheckpointError(f"checkpoint {self.path} cannot be written: {shown(reason)}.")


def _item_of(name: str) -> tuple[str, str]:
    """Folder of the step and name in it: weights lie apart from all else (`manager.py`)."""
    top, _, inner = name.partition("/")
    return ("params", inner) if top == "params" else ("rest", name)


def carried_file(step_dir: str | pathlib.Path) -> pathlib.Path | None:
    """The file of tensors carried along with a step; None without any."""
    path = pathlib.Path(step_dir) / _CARRIED
    return path if path.is_file() else None


def read_carried(step_dir: str | pathlib.Path) -> SafetensorsFile | None:
    """The tensors carried along with a step under their Hugging Face names; None without any."""
    path = carried_file(step_dir)
    return None if path is None else SafetensorsFile(path)
