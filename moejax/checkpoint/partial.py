"""Folders that are written beside their name and renamed once complete."""

from __future__ import annotations

import os
import pathlib
import shutil

_MARK = ".partial-"


def partial_folder(out: pathlib.Path) -> pathlib.Path:
    """Where `out` is written; what killed processes left of it is removed first."""
    for left in out.parent.glob(f"{out.name}{_MARK}*"):
        owner = left.name.rpartition(_MARK)[2]
        if owner.isdigit() and not _runs(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    return out.with_name(f"{out.name}{_MARK}{os.getpid()}")


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
