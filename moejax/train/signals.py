"""Stopping politely.

The first Ctrl-C or SIGTERM asks the loop to save and end, a second Ctrl-C ends at once. So does the
first one while the step is compiled: there is nothing to save, and it may take minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from moejax.cluster import code_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_GRACE_S = 3.0  # for the main thread to leave by itself at a second Ctrl-C


class StopRequest:
    """A context in which SIGINT and SIGTERM are noted instead of obeyed.

    Python runs a signal's handler between two of its own instructions, so not while XLA compiles.
    A thread that the interpreter's wake-up pipe tells of a signal answers at once.
    """

    def __init__(self, say: Callable[[str], Any] = lambda line: None, *, several: bool = False):
        """
        Args:
          say: takes the line that acknowledges a signal; called from another thread.
          several: whether this is one of several processes, for the exit code.
        """
        self.signum: int | None = None
        self._say, self._several = say, several
        self._nothing_to_save = False
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        self._pipe: tuple[int, int] | None = None
        self._leaving = False  # no Event: its lock could be held where a handler runs

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                self._old[signum] = signal.signal(signum, self._note)
            self._listen()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._leaving = True
        if self._pipe is not None:
            signal.set_wakeup_fd(self._old_wakeup)
            os.close(self._pipe[1])  # ends the thread, which closes the other end
        for signum, handler in self._old.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def nothing_to_save(self) -> Iterator[None]:
        """While this lasts a signal ends the process at once."""
        self._nothing_to_save = True
        try:
            yield
        finally:
            self._nothing_to_save = False

    def _listen(self) -> None:
        read, write = self._pipe = os.pipe()
        os.set_blocking(write, False)
        self._old_wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._answer, args=(read,), name="signals", daemon=True).start()

    def _answer(self, read: int) -> None:
        seen: list[int] = []
        while numbers := os.read(read, 1):
            if numbers[0] not in _SIGNALS:
                continue
            seen.append(numbers[0])
            name = signal.Signals(numbers[0]).name
            if self._nothing_to_save:
                self._tell(f"{name}: quitting, there is nothing to save yet")
                os._exit(code_of(numbers[0], several=self._several))
            if len(seen) == 1:
                again = "again" if numbers[0] == signal.SIGINT else "Ctrl-C"
                self._tell(f"{name}: stopping after this step and saving; {again} to quit now")
            elif numbers[0] == signal.SIGINT and not self._leaves_in_time():
                self._tell(f"{name}: quitting")
                os._exit(128 + numbers[0])  # the main thread compiles, and would for minutes
        os.close(read)

    def _leaves_in_time(self) -> bool:
        deadline = time.monotonic() + _GRACE_S
        while not self._leaving and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._leaving

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads: the signal still counts
            self._say(line)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            self._leaving = True
            raise KeyboardInterrupt
        self.signum = signum

    @property
    def name(self) -> str:
        """Name of the signal that came, empty without one."""
        return "" if self.signum is None else signal.Signals(self.signum).name
