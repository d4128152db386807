"""Rectangles of a checkpoint's leaves, read without reading the rest."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import tensorstore as ts

from moejax.checkpoint.layout import CheckpointError
from moejax.checkpoint.reader import read_meta


class LeafReader:
    """One step, opened for reading piece by piece; leaves are opened at first use.

    Both layouts are read: what Orbax writes for a run (one database of all leaves), and one array a
    folder, as an import writes.

    Attributes:
      step_dir: the step.
      meta: its JSON: config, leaves with shapes and dtypes.
    """

    def __init__(self, step_dir: str | pathlib.Path, *, verify: bool = True):
        """
        Args:
          verify: compare the files with their checksums first.
        Raises:
          CheckpointError: no step there, or a damaged one.
        """
        self.step_dir = pathlib.Path(step_dir)
        self.meta = read_meta(self.step_dir, verify=verify)
        self._open: dict[str, Any] = {}
        self._layouts: dict[str, dict[str, Any]] = {}
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": 64 << 20}})

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> np.ndarray:
        """Values of a leaf (`params/stack0/run0/attn/q`) at an index; () is all of it."""
        if name not in self.meta["leaves"]:
            raise CheckpointError(f"checkpoint {self.step_dir} has no leaf {name}.")
        if name not in self._open:
            self._open[name] = self._open_leaf(name)
        array = self._open[name]
        try:
            return np.asarray((array[index] if index else array).read().result())
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:160]
            raise CheckpointError(f"checkpoint {self.step_dir}, leaf {name}: {reason}") from error

    def _open_leaf(self, name: str) -> Any:
        top, _, inner = name.partition("/")
        item, path = ("params", inner) if top == "params" else ("rest", name)
        folder = self.step_dir / item
        if item not in self._layouts:
            self._layouts[item] = json.loads((folder / "_METADATA").read_text())
        layout = self._layouts[item]
        if layout.get("use_ocdbt", True):
            store: dict[str, Any] = {"driver": "ocdbt", "base": f"file://{folder}/"}
            store["path"] = path.replace("/", ".") + "/"
        else:
            store = {"driver": "file", "path": f"{folder / path.replace('/', '.')}/"}
        driver = "zarr3" if layout.get("use_zarr3") else "zarr"
        spec = {"driver": driver, "kvstore": store}
        try:
            return ts.open(spec, read=True, open=True, context=self._context).result()
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0][:160]
            raise CheckpointError(f"checkpoint {self.step_dir}, leaf {name}: {reason}") from error
