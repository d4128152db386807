"""Tiles that were timed on a device go before those that were reasoned.

`python -m pallas_kernels.tune` times tiles and writes the better ones to `tuned.json` beside the
`tiles.py` of an operator; a function there that is `tunable` looks the present device up in it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from pallas_kernels.choose import target_platform

P = ParamSpec("P")
T = TypeVar("T")


class Question(NamedTuple):
    """One choice of tiles: by which function, for which sizes."""

    function: str
    sizes: str


_forced: contextvars.ContextVar[Mapping[Question, Any] | None] = contextvars.ContextVar(
    "forced", default=None
)
_asked: contextvars.ContextVar[dict[Question, Any] | None] = contextvars.ContextVar(
    "asked", default=None
)


def tunable(reasoned: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function of sizes that returns tiles, a NamedTuple of integers.

    The table is `tuned.json` in the function's folder; an entry counts only for the device that it
    was timed on, for the same sizes, and as long as the tiles have the same fields.
    """
    table = pathlib.Path(reasoned.__code__.co_filename).with_name("tuned.json")
    signature = inspect.signature(reasoned)

    @functools.wraps(reasoned)
    def chosen(*args: P.args, **kwargs: P.kwargs) -> T:
        tiles = reasoned(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        sizes = {name: x for name, x in bound.arguments.items() if name != "chip"}
        question = Question(reasoned.__name__, _text(sizes))
        asked = _asked.get()
        if asked is not None:
            asked.setdefault(question, tiles)
        forced = _forced.get() or {}
        if question in forced:
            return forced[question]
        kind = present_device()
        entry = read(table).get(kind, {}).get(question.function, {}).get(question.sizes)
        return rebuilt(tiles, entry["tiles"]) if entry else tiles

    return chosen


@contextlib.contextmanager
def forcing(tiles: Mapping[Question, Any]) -> Iterator[None]:
    """Answers these questions so; functions that were traced before keep what they had."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


@contextlib.contextmanager
def asking() -> Iterator[dict[Question, Any]]:
    """Collects the questions that are asked while tracing, with the reasoned answers."""
    asked: dict[Question, Any] = {}
    token = _asked.set(asked)
    try:
        yield asked
    finally:
        _asked.reset(token)


def present_device() -> str:
    """Kind of the device that is here, or "" while programs are made for another one."""
    backend = jax.default_backend()
    platform = backend if backend in ("cpu", "tpu") else "gpu"
    return jax.devices()[0].device_kind if platform == target_platform() else ""


@functools.cache
def read(table: pathlib.Path) -> Mapping[str, Any]:
    """device -> function -> sizes -> entry; empty where nothing was tuned."""
    return json.loads(table.read_text()) if table.is_file() else {}


def write(
    table: pathlib.Path, device: str, question: Question, tiles: Any, facts: Mapping[str, Any]
) -> None:
    """Enters tiles for a device, with how they were found."""
    known = json.loads(table.read_text()) if table.is_file() else {}
    of_function = known.setdefault(device, {}).setdefault(question.function, {})
    of_function[question.sizes] = {"tiles": fields(tiles), **facts}
    table.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    read.cache_clear()


def fields(tiles: Any) -> dict[str, int]:
    """Names of the integers in tiles, those of inner tuples with a dot, and their values."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tiles):
        names = (str(getattr(key, "name", getattr(key, "idx", key))) for key in path)
        found[".".join(names)] = leaf
    return found


def rebuilt(like: Any, values: Mapping[str, int]) -> Any:
    """Tiles with other integers; `like` itself where the names are not the same."""
    if fields(like).keys() != values.keys():
        return like
    return jax.tree.unflatten(jax.tree.structure(like), [values[name] for name in fields(like)])


def _text(value: Any) -> str:
    """Sizes as text, the same in every process; a dtype by its name."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(x)}" for name, x in value.items())
    if value is None or isinstance(value, bool | int | float | str):
        return str(value)
    return str(jnp.dtype(value))
