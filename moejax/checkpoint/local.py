"""Checkpoints on each host's own disk or memory, cheap and often, before the durable ones.

Every process writes the shards that its devices hold, and nobody else's, to a file of its own:

    <local_dir>/<id of the run>/process-00003/<step>.npz

A step counts when all processes of the run have it whole and the run has the shape it had: as many
processes, with the same mesh. After the loss of a host, or on another number of hosts, there is no
such step and the run goes on from its newest durable checkpoint.
"""

from __future__ import annotations

import json
import os
import pathlib
import threading
import uuid
import zipfile
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from moejax.checkpoint.layout import CheckpointError, describe, from_json, named_leaves, to_json
from moejax.cluster import meet
from moejax.config import CheckpointConfig
from moejax.typing import PyTree

ID_FILE = "local_checkpoints.json"
_KEEP = 2  # one may be half-written
_META = "meta"


class LocalState(NamedTuple):
    """A restored step: the state, where the data stood, and its number."""

    state: PyTree
    position: Any
    step: int


class LocalCheckpoints:
    """The checkpoints of one process; all processes of a run call its methods together."""

    def __init__(self, cfg: CheckpointConfig, workdir: str | os.PathLike[str], mesh: Mesh):
        """
        Args:
          cfg: `local_every` and `local_dir` are read.
          workdir: of the run; the run's id is kept there, so that a run begun anew in the same
            place finds none of the old steps.
          mesh: of the run.
        """
        self._every, self._process = cfg.local_every, jax.process_index()
        root = pathlib.Path(cfg.local_dir).expanduser() / _run_id(pathlib.Path(workdir))
        self.folder = root / f"process-{self._process:05d}"
        self._shape = {"processes": jax.process_count(), "mesh": dict(mesh.shape)}
        self._writer: threading.Thread | None = None
        self._failed: OSError | None = None

    def due(self, step: int) -> bool:
        """Whether this step is to be saved."""
        return step % self._every == 0

    def save(self, step: int, state_tree: Mapping[str, PyTree], position: Any) -> None:
        """Saves a step; returns once the shards are copied, so that they may be donated.

        Raises:
          CheckpointError: the save before this one failed.
        """
        self.wait()
        shards, index = {}, {}
        for name, leaf in named_leaves(state_tree).items():
            for number, (where, data) in enumerate(_own_shards(leaf).items()):
                # As bytes: a .npy file knows no bfloat16.
                shards[f"{name}#{number}"] = np.frombuffer(data.tobytes(), np.uint8)
                index[f"{name}#{number}"] = [name, where]
        meta = {
            **self._shape, "position": to_json(position), "leaves": describe(state_tree),
            "index": index,
        }  # fmt: skip
        shards[_META] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        self._writer = threading.Thread(target=self._write, args=(step, shards), daemon=True)
        self._writer.start()

    def _write(self, step: int, shards: dict[str, np.ndarray]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            scratch = self.folder / f"{step}.tmp"
            with scratch.open("wb") as file:
                np.savez(file, allow_pickle=False, **shards)
            os.replace(scratch, self.folder / f"{step}.npz")
            for old in self._steps()[:-_KEEP]:
                self._path(old).unlink(missing_ok=True)
        except OSError as error:
            self._failed = error

    def wait(self) -> None:
        """Returns when the save in progress is on disk. Raises CheckpointError if it failed."""
        if self._writer is not None:
            self._writer.join()
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise CheckpointError(
                f"local checkpoints cannot be written to {self.folder}: {error.strerror or error}. "
                "Choose another checkpoint.local_dir, or checkpoint.local_every=0."
            )

    def clear(self) -> None:
        """Forgets all steps: the run goes back behind them."""
        self.wait()
        for step in self._steps():
            self._path(step).unlink(missing_ok=True)

    def newest(self) -> int | None:
        """The newest step that every process has whole; None where there is none."""
        own = [step for step in self._steps() if self._usable(step)][-_KEEP:]
        padded = np.array(own + [-1] * (_KEEP - len(own)), np.int32)
        everyone = np.atleast_2d(multihost_utils.process_allgather(padded))
        common = set.intersection(*(set(map(int, row)) for row in everyone)) - {-1}
        return max(common, default=None)

    def restore(self, step: int, abstract: Mapping[str, PyTree]) -> LocalState:
        """Reads a step onto the mesh of `abstract`, which is that of the run.

        Raises:
          CheckpointError: other leaves or shapes.
        """
        with np.load(self._path(step), allow_pickle=False) as file:
            meta = _meta(file)
            if meta["leaves"] != describe(abstract):
                raise CheckpointError(
                    f"{self._path(step)} is of another model. Use the config it was made with, or "
                    "delete it to go on from the newest durable checkpoint."
                )
            found: dict[str, dict[str, np.ndarray]] = {}
            for key, (name, where) in meta["index"].items():
                found.setdefault(name, {})[where] = file[key]
        leaves = [_placed(leaf, found[name]) for name, leaf in named_leaves(abstract).items()]
        state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
        return LocalState(state, from_json(meta["position"]), step)

    def _usable(self, step: int) -> bool:
        """Whether a step is whole (a zip has checksums) and of a run of this shape."""
        try:
            with zipfile.ZipFile(self._path(step)) as archive:
                if archive.testzip() is not None:
                    return False
            with np.load(self._path(step), allow_pickle=False) as file:
                meta = _meta(file)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):
            return False
        return all(meta.get(name) == value for name, value in self._shape.items())

    def _steps(self) -> list[int]:
        return sorted(int(p.stem) for p in self.folder.glob("*.npz") if p.stem.isdigit())

    def _path(self, step: int) -> pathlib.Path:
        return self.folder / f"{step}.npz"


def _own_shards(leaf: Any) -> dict[str, np.ndarray]:
    """What this process holds of an array, each part once, by its place."""
    if not isinstance(leaf, jax.Array):
        return {_place((slice(None),) * np.ndim(leaf), np.shape(leaf)): np.asarray(leaf)}
    once = {_place(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}
    return {where: np.asarray(shard.data) for where, shard in once.items()}


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    ranges = (part.indices(size) for part, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in ranges)


def _placed(leaf: jax.ShapeDtypeStruct, parts: Mapping[str, np.ndarray]) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        sizes = [len(range(*one.indices(n))) for one, n in zip(index, leaf.shape, strict=True)]
        return parts[_place(index, leaf.shape)].view(leaf.dtype).reshape(sizes)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, part)


def _meta(file: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return json.loads(file[_META].tobytes())


def _run_id(workdir: pathlib.Path) -> str:
    """A name that this run alone has, the same in all its processes."""
    path = workdir / ID_FILE
    if jax.process_index() == 0 and not path.exists():
        workdir.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f"{ID_FILE}.tmp")
        scratch.write_text(json.dumps({"id": uuid.uuid4().hex}) + "\n")
        os.replace(scratch, path)
    meet()
    return json.loads(path.read_text())["id"]
