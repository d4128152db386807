"""One run in a workdir at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

import jax

from moejax.config import ConfigError
from moejax.observability.metrics import unwritable

FILE = "run.lock"
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextlib.contextmanager
def sole_run(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the workdir for this process; a second run is refused.

    The operating system frees the lock however the process ends. Where the file system has no
    locks there is none, and no error. A folder made here and left empty is removed again.

    Raises:
      ConfigError: another process holds it, or the workdir cannot be written.
    """
    if jax.process_index():
        yield
        return
    was_there = workdir.exists()
    path = workdir / FILE
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        handle = _locked(path)
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock is free, so that it is nobody else's file
        os.close(handle)
        if not was_there:
            with contextlib.suppress(OSError):
                workdir.rmdir()


def _locked(path: pathlib.Path) -> int:
    """The file, open and locked where that is possible, with our process' number in it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                holder = os.read(handle, 200).decode(errors="replace").strip()
                os.close(handle)
                raise ConfigError(_in_use(path.parent, holder)) from error
        if _is_at(path, handle):
            break
        os.close(handle)  # the run before removed it between our two calls
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    return handle


def _is_at(path: pathlib.Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _in_use(workdir: pathlib.Path, holder: str) -> str:
    return (
        f"workdir {workdir} is in use by process {holder or 'unknown'}: a run writes to it. "
        "Wait for it to end or stop it, or choose another --workdir."
    )
