"""What a checkpoint looks like on disk: where its steps lie, how leaves are named, what JSON holds.

``<workdir>/checkpoints/<step>/`` holds

- ``params/``: weights, apart so that a new run can start from them alone;
- ``rest/``: optimizer, balancing state, step, random key;
- ``meta/``: JSON of format version, config, data position, metrics, name and shape of leaves;
- ``checksums.json``: size and CRC-32 of every file above.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import fsspec
import jax
import numpy as np
from etils import epath

from moejax.config import ConfigError
from moejax.config.load import RESOLVED_FILE
from moejax.typing import PyTree

FORMAT_VERSION = 1
SUBDIR = "checkpoints"
_BYTES = "__bytes__"
_STORE = "gs://"
# Written last where nothing can be renamed at once; Orbax's name for it.
COMMITTED = "commit_success.txt"


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message is one line, meant for the user."""


def in_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the address of an object store."""
    return os.fspath(path).startswith(_STORE)


def as_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """An absolute path; for an object store one with the same methods that speaks to it.

    Raises:
      CheckpointError: what speaks to it is not installed.
    """
    if not in_store(path):
        return pathlib.Path(path).expanduser().absolute()
    if not any(map(importlib.util.find_spec, ("gcsfs", "tensorflow"))):
        raise CheckpointError(f"{os.fspath(path)} needs gcsfs: pip install 'moejax[gcs]'.")
    # Other processes write there: what was listed once may have changed since.
    fsspec.config.conf.setdefault("gcs", {})["use_listings_cache"] = False
    return cast(pathlib.Path, epath.Path(os.fspath(path)))


def steps_in(directory: pathlib.Path) -> list[int]:
    """Finished steps, ascending.

    Orbax renames a step to its number only once it is complete. In an object store, where a
    folder is nothing that could be renamed, it adds a file.
    """
    if not directory.is_dir():
        return []
    steps = [p for p in directory.iterdir() if p.name.isdigit() and p.is_dir()]
    if in_store(directory):
        steps = [p for p in steps if (p / COMMITTED).is_file()]
    return sorted(int(p.name) for p in steps)


def files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """All files at any depth; object stores list no deeper than one level at a time."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            yield from files_below(path)
        elif path.is_file():
            yield path


def size_bytes(path: pathlib.Path) -> int:
    """Of a file."""
    if in_store(path):
        return cast(Any, path).stat().length
    return path.stat().st_size


def kept_elsewhere(workdir: pathlib.Path) -> str:
    """`checkpoint.dir` of the run in a folder, "" where it keeps its checkpoints there."""
    try:
        said = json.loads((workdir / RESOLVED_FILE).read_text())["checkpoint"]["dir"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(said)


def checkpoints_dir(path: str | pathlib.Path) -> pathlib.Path:
    """The folder of steps that belongs to `path`, a workdir or already a folder of steps."""
    path = as_path(path)
    return path if path.name == SUBDIR or steps_in(path) else path / SUBDIR


def locate(path: str | pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Folder of steps and the chosen step (None: the newest) of a workdir, folder of steps or step.

    Raises:
      CheckpointError: nothing there is a checkpoint; the line lists what is there.
    """
    path = as_path(path)
    if path.name.isdigit() and path.is_dir():
        return path.parent, int(path.name)
    directory = checkpoints_dir(path)
    if steps_in(directory):
        return directory, None
    if elsewhere := kept_elsewhere(path):
        raise CheckpointError(
            f"the run in {path} keeps its checkpoints in {elsewhere}: copy one to {directory}/STEP."
        )
    if not path.exists():
        raise CheckpointError(f"no checkpoint at {path}: the path does not exist.")
    names = sorted(p.name for p in path.iterdir()) if path.is_dir() else ["a file"]
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    raise CheckpointError(
        f"no checkpoint at {path}: found {shown or 'nothing'}. "
        f"Name a workdir, its {SUBDIR}/ folder, or one step in it."
    )


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Leaves of any pytree by their path, in flattening order: `opt_state/0/mu/w`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {
        "/".join(jax.tree_util.keystr((key,), simple=True) for key in path): leaf
        for path, leaf in flat
    }
    assert len(named) == len(flat), "two leaves of the state have one name"
    return named


def nest(named: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dictionaries from path names: plain containers, which any Orbax user can read."""
    tree: dict[str, Any] = {}
    for name, leaf in named.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def describe(tree: PyTree) -> dict[str, Any]:
    """Name -> [shape, dtype] of every leaf, as JSON."""
    return {name: [list(x.shape), str(x.dtype)] for name, x in named_leaves(tree).items()}


def check_leaves(
    where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any], *, dtypes: bool = True
) -> None:
    """Raises CheckpointError naming the first leaf in which checkpoint and model differ."""
    # Weights first: their names say more than those of the optimizer's copies.
    for name in sorted(wanted, key=lambda name: not name.startswith("params/")):
        shape, dtype = wanted[name]
        if name not in saved:
            raise CheckpointError(
                f"checkpoint {where} is of another model: it has no {name} {tuple(shape)}. "
                "Use the config it was made with, or another workdir."
            )
        got_shape, got_dtype = saved[name]
        if list(got_shape) != list(shape) or (dtypes and got_dtype != dtype):
            raise CheckpointError(
                f"checkpoint {where} is of another shape: {name} is {got_dtype}{tuple(got_shape)} "
                f"there and {dtype}{tuple(shape)} in this config. Use the config it was made with, "
                "or another workdir."
            )
    extra = next((name for name in saved if name not in wanted), None)
    if extra is not None:
        raise CheckpointError(
            f"checkpoint {where} is of another model: it also has {extra} "
            f"{tuple(saved[extra][0])}. Use the config it was made with, or another workdir."
        )


def to_json(value: Any) -> Any:
    """`value` in JSON types: bytes as base64, tuples as lists, numpy numbers as numbers."""
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"a checkpoint holds JSON and bytes, not {type(value).__name__}: {value!r}")


def from_json(value: Any) -> Any:
    """Inverse of `to_json` (tuples stay lists)."""
    if isinstance(value, dict):
        if set(value) == {_BYTES}:
            return base64.b64decode(value[_BYTES])
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value
