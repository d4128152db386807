"""Folders that are written beside their name and renamed once complete."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Iterator

from moejax.checkpoint.layout import CheckpointError

_MARK = ".partial-"


def partial_folder(out: pathlib.Path) -> pathlib.Path:
    """Where `out` is written; what killed processes left of it is removed first."""
    for left in out.parent.glob(f"{out.name}{_MARK}*"):
        owner = left.name.rpartition(_MARK)[2]
        if owner.isdigit() and not _runs(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return out.with_name(f"{out.name}{_MARK}{os.getpid()}")


def free_folder(out: str | pathlib.Path) -> pathlib.Path:
    """`out` as an absolute path. Raises CheckpointError unless it is free: missing or empty."""
    out = pathlib.Path(out).expanduser().absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty: name another folder.")
    return out


@contextlib.contextmanager
def written_whole(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder that becomes `out` at the end of the block; after an error nothing of it stays.

    Raises:
      CheckpointError: a file or folder cannot be written.
    """
    partial = partial_folder(out)
    try:
        partial.mkdir(parents=True)
        yield partial
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
