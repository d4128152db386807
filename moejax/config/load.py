"""From what a user names (a shipped config, a file, nested values) to a checked RunConfig.

Config files are ml_collections files: Python with a `get_config()` that returns a ConfigDict. No
ConfigDict leaves this module.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict, FrozenConfigDict

from moejax.config.fields import (
    ConfigError,
    Section,
    as_dict,
    build_section,
    flat_names,
    listed,
    unknown_field_message,
)
from moejax.config.run import RunConfig

RESOLVED_FILE = "config.json"  # in a run's folder: its config as it was resolved
_PACKAGE = "configs"
_MODULE = "moejax_config_file"
_WORD = re.compile(r"[\w./*~=:-]+")
_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def shipped_folder() -> pathlib.Path:
    """Where the shipped configs are: in an installed wheel, else at the root of the checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    inside = package / "_shipped" / _PACKAGE
    return inside if inside.is_dir() else package.parent / _PACKAGE


def shipped_names() -> list[str]:
    """Names that `--config=NAME` finds without a path."""
    return sorted(
        path.stem for path in shipped_folder().glob("*.py") if not path.stem.startswith("_")
    )


def load_config(
    config: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> RunConfig:
    """The checked config of a file, with some fields changed.

    Args:
      config: name of a shipped config (`tiny`), path of a config file or of a `config.json` that a
        run wrote, or the run's folder.
      overrides: dotted field name -> value, or the value's text as on a command line.
    Raises:
      ConfigError: no such file, an error inside it, an unknown field, a wrong type or range.
    """
    path = _find(config)
    values = _resolved(path) if path.suffix == ".json" else _execute(path)
    return as_run_config(values, overrides)


def as_run_config(
    config: RunConfig | Mapping[str, Any] | ConfigDict | str | os.PathLike[str],
    overrides: Mapping[str, Any] | None = None,
) -> RunConfig:
    """A RunConfig from whatever names one: itself, nested mappings, a ConfigDict, a name, a path.

    Raises:
      ConfigError: as `load_config`.
    """
    if isinstance(config, str | os.PathLike):
        return load_config(config, overrides)
    if isinstance(config, RunConfig):
        values = as_dict(config)
    elif isinstance(config, ConfigDict | FrozenConfigDict):
        values = config.to_dict()
    elif isinstance(config, Mapping):
        values = {k: v.to_dict() if isinstance(v, ConfigDict) else v for k, v in config.items()}
    else:
        raise ConfigError(
            f"a config is a RunConfig, a mapping, a name or a path, not {type(config).__name__}."
        )
    base = build_section(RunConfig, values)
    return apply_overrides(base, overrides) if overrides else base


def apply_overrides(base: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """`base` with dotted fields changed; text is read as the field's type says.

    Raises:
      ConfigError: an unknown field (with the nearest ones), a wrong type, or a value out of range.
    """
    known = flat_names(base)
    values = as_dict(base)
    for name, value in overrides.items():
        if name not in known:
            raise ConfigError(_not_a_field(name, known))
        *sections, leaf = name.split(".")
        node = values
        for section in sections:
            node = node[section]
        node[leaf] = _read(name, value, known[name]) if isinstance(value, str) else value
    return build_section(RunConfig, values)


def _not_a_field(name: str, known: Mapping[str, Any]) -> str:
    inside = [field for field in known if field.startswith(name + ".")]
    if inside:
        return f"{name} is a section, not a field; it has {listed(inside)}."
    return unknown_field_message(name, known)


def _read(name: str, text: str, default: Any) -> Any:
    """The value that `text` stands for in a field with this default."""
    kind = type(default)
    if kind is str:
        return text
    if kind is bool and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    with contextlib.suppress(ValueError):
        if kind in (int, float):
            return kind(text)
    if kind is tuple:
        value = _read_tuple(name, text)
        if isinstance(value, tuple | list | Mapping):
            return value if isinstance(value, Mapping) else tuple(value)
    wanted = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        tuple: "a list such as a,b or a Python tuple such as ('a', 'b') or ('a',)",
    }
    raise ConfigError(f"{name}={text!r} is not {wanted[kind]}.")


def _read_tuple(name: str, text: str) -> Any:
    """What a Python tuple, a JSON list or object, or the .json file called `text` holds.

    Bare words with commas between them are a tuple of words.
    """
    if text.endswith(".json"):
        try:
            return json.loads(pathlib.Path(text).expanduser().read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name}={text!r} is not a JSON file ({error}).") from error
    for read in (ast.literal_eval, json.loads):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(text)
    words = text.removesuffix(",").split(",")
    return tuple(words) if all(map(_WORD.fullmatch, words)) else None


def _find(config: str | os.PathLike[str]) -> pathlib.Path:
    """The file that a name or path stands for."""
    text = os.fspath(config)
    names = shipped_names()
    if text in names:
        return shipped_folder() / f"{text}.py"
    path = pathlib.Path(text).expanduser()
    for file in (path, path / RESOLVED_FILE):
        if file.is_file():
            return file.absolute()
    near = difflib.get_close_matches(path.stem, names, n=1, cutoff=0.6)
    hint = f" Did you mean {near[0]}?" if near else ""
    what = f"is a folder without {RESOLVED_FILE}" if path.is_dir() else "is no file"
    raise ConfigError(
        f"config {text!r} {what} and no shipped config; shipped are {', '.join(names)}.{hint}"
    )


def _resolved(path: pathlib.Path) -> dict[str, Any]:
    """The nested values of a JSON file in the shape of `as_dict`, as a run writes its config."""
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {path} cannot be read as JSON ({error}).") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config {path} holds {type(values).__name__}, not sections of fields.")
    return values


def _execute(path: pathlib.Path) -> dict[str, Any]:
    """The nested values that the config file's `get_config()` returns."""
    try:
        with _configs_importable(path):
            module = _run_file(path)
            if not callable(getattr(module, "get_config", None)):
                raise ConfigError(f"{path} is not a config file: it has no function get_config().")
            values = module.get_config()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(_where_it_failed(path, error)) from error
    if isinstance(values, ConfigDict | FrozenConfigDict):
        return values.to_dict()
    if isinstance(values, Mapping):
        return dict(values)
    raise ConfigError(
        f"get_config() of {path} returns {type(values).__name__}; it must be a ConfigDict."
    )


def _run_file(path: pathlib.Path) -> ModuleType:
    loader = importlib.machinery.SourceFileLoader(_MODULE, str(path))
    spec = importlib.util.spec_from_file_location(_MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextlib.contextmanager
def _configs_importable(path: pathlib.Path) -> Iterator[None]:
    """While a config file runs, `from configs import base` finds the shipped base.

    A file that lies in a folder `configs` finds its neighbours first. Modules called `configs` that
    the program had imported before are put back, so that a user's own package of that name stays
    what it was; and no bytecode is left beside the user's file.
    """

    def ours() -> list[str]:
        return [n for n in sys.modules if n == _PACKAGE or n.startswith(_PACKAGE + ".")]

    folders = [str(path.parent)] if path.parent.name == _PACKAGE else []
    folders.append(str(shipped_folder()))
    if path.parent != shipped_folder():
        found = importlib.machinery.PathFinder.find_spec(_PACKAGE)
        folders += list(found.submodule_search_locations or []) if found else []
    before = {name: sys.modules.pop(name) for name in ours()}
    package = ModuleType(_PACKAGE)
    package.__path__ = list(dict.fromkeys(folders))
    sys.modules[_PACKAGE] = package
    bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = bytecode
        for name in ours():
            del sys.modules[name]
        sys.modules.update(before)


def _where_it_failed(path: pathlib.Path, error: BaseException) -> str:
    """One line for an exception out of a config file: place, kind, first line of its message."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{error.filename}:{error.lineno}"
        text = error.msg
    else:
        # The innermost frame inside a config, not inside a library it called.
        own = {str(path.parent), str(shipped_folder())}
        frames = traceback.extract_tb(error.__traceback__)
        inside = [f for f in frames if os.path.dirname(f.filename) in own]
        where = f"{inside[-1].filename}:{inside[-1].lineno}" if inside else str(path)
        text = " ".join(str(error).split())
    return f"{where}: {type(error).__name__}: {text}"


def field_comments() -> dict[str, str]:
    """Dotted field -> the comment above it in the shipped `base.py`, joined into one line."""
    comments: dict[str, str] = {}
    pending: list[str] = []
    for raw in (shipped_folder() / "base.py").read_text(encoding="utf-8").splitlines():
        line = raw.strip()
        if line.startswith("#"):
            pending.append(line.lstrip("# "))
            continue
        name, equals, _ = line.partition(" = ")
        if pending and equals and name.startswith("c."):
            comments[name.removeprefix("c.")] = " ".join(pending)
        pending = []
    return comments


def section_names(section: Section, prefix: str = "") -> list[str]:
    """Dotted names of all sections below `section`, in order."""
    names = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, Section):
            names += [prefix + field.name, *section_names(value, f"{prefix}{field.name}.")]
    return names
