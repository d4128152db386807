"""Globs to files, each with a name that does not depend on where the data lies."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from moejax.config import ConfigError


def matches(
    patterns: Iterable[str], *, what: str = "file", field: str = "data.paths"
) -> dict[str, str]:
    """Path of everything that matches -> its name, the path below the pattern's fixed folder.

    Args:
      patterns: paths or globs, `**` for any depth, `~` for the home folder.
      what: "file" or "folder".
      field: the setting they come from, for messages.
    Raises:
      ConfigError: a pattern matches nothing.
    """
    is_one: Callable[[str], bool] = os.path.isdir if what == "folder" else os.path.isfile
    found: dict[str, str] = {}
    for pattern in patterns:
        full = os.path.expanduser(pattern)
        paths = [full] if os.path.exists(full) else sorted(glob.glob(full, recursive=True))
        paths = [path for path in paths if is_one(path)]
        if not paths:
            raise ConfigError(
                f"{field}: {pattern!r} names no {what}. Give a {what} that exists, or a glob that "
                "matches."
            )
        root = fixed_folder(os.path.normpath(full))
        for path in paths:
            found.setdefault(os.path.realpath(path), Path(os.path.relpath(path, root)).as_posix())
    return found


def fixed_folder(pattern: str) -> str:
    """The folder above the first component that has a wildcard."""
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder or "."
