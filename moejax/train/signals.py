"""Stopping politely.

The first Ctrl-C or SIGTERM asks the loop to save and end, a second Ctrl-C ends at once.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """A context in which SIGINT and SIGTERM are noted instead of obeyed."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._old[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._old.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signum = signum

    @property
    def name(self) -> str:
        """Name of the signal that came, empty without one."""
        return "" if self.signum is None else signal.Signals(self.signum).name
