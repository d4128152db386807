"""Progress bars of commands: on a terminal only, on the error stream, gone when done."""

from __future__ import annotations

import rich.console
import rich.progress as bars


class CountBar:
    """Things done of all, and time left. A context manager.

    Args:
      label: what is counted, in one word.
    """

    def __init__(self, label: str):
        console = rich.console.Console(stderr=True)
        self._bar = bars.Progress(
            bars.TextColumn(label),
            bars.BarColumn(bar_width=24),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> CountBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Shows so many of so many."""
        self._bar.update(self._task, completed=done, total=total)


class ByteBar:
    """Bytes done, speed and time left. A context manager.

    Args:
      label: what is being done, in one word.
      enabled: False shows nothing.
    """

    def __init__(self, label: str, *, enabled: bool = True):
        console = rich.console.Console(stderr=True)
        self._bar = bars.Progress(
            bars.TextColumn(label),
            bars.BarColumn(bar_width=24),
            bars.DownloadColumn(),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not (enabled and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> ByteBar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, name: str = "") -> None:
        """Shows so many bytes of so many."""
        self._bar.update(self._task, completed=done, total=total)
