"""Who has stopped? Signs of life of the processes of a run, so that none waits for ever.

Every process writes a file with a counter and the step it has begun, and watches the next one's,
so that the traffic grows with the number of processes and not with its square. Whoever finds the
next one silent writes down whose fault it is; all read that and leave. Ages are counted by the
watcher's monotonic clock: no clock of another host matters, nor a clock that jumps.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import threading
import time
from collections.abc import Callable
from typing import Any

from moejax.cluster.leave import leave

FOLDER = "heartbeats"
_VERDICT = "verdict"
_BEATS = 10  # in the time after which silence counts
_STALLS = 10  # times that long without a step, though all are alive: it will not come


class Watchdog:
    """A context in which this process gives signs of life and watches another's."""

    def __init__(
        self, workdir: str | os.PathLike[str], index: int, count: int, patience_s: float, *,
        say: Callable[[str], Any] = print, leave: Callable[[str], Any] = leave,
        meet: Callable[[], Any] = lambda: None,
    ):  # fmt: skip
        """
        Args:
          workdir: of the run, the same for all; the folder `heartbeats` is made there.
          index, count: number of this process, and how many there are; alone it watches nobody.
          patience_s: silence that counts, and time without a step after which the last one is
            named; 0 = nothing is watched.
          say: takes a line on a step that does not come.
          leave: ends the process, with a line.
          meet: waits for all processes.
        """
        self._folder = pathlib.Path(workdir) / FOLDER
        self._index, self._count, self._patience_s = index, count, patience_s
        self._say, self._leave, self._meet = say, leave, meet
        self._step: int | None = None
        self._since = time.monotonic()
        self._named = False
        self._beat = 0
        self._seen: tuple[str, float] = "", time.monotonic()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def at(self, step: int | None) -> None:
        """This process begins a step; None: something else that may take long."""
        self._step, self._since, self._named = step, time.monotonic(), False

    def __enter__(self) -> Watchdog:
        if self._count > 1 and self._patience_s:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._index == 0:
                (self._folder / _VERDICT).unlink(missing_ok=True)
            self._write()
            self._meet()
            self._seen = "", time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self._path(self._index).unlink(missing_ok=True)  # silent from now on, and no fault

    def _watch(self) -> None:
        while not self._ended.wait(self._patience_s / _BEATS):
            with contextlib.suppress(OSError):  # a folder that is gone: others tell of that
                self.look()

    def look(self) -> None:
        """Gives one sign of life and looks for those of others."""
        self._write()
        verdict = self._folder / _VERDICT
        if verdict.exists():
            self._leave(verdict.read_text(encoding="utf-8"))
        now, neighbour = time.monotonic(), (self._index + 1) % self._count
        sign = self._read(neighbour)
        if sign != self._seen[0]:
            self._seen = sign, now
        elif sign and now - self._seen[1] > self._patience_s:
            self._blame(
                f"process {neighbour} has given no sign of life for {self._patience_s:g} s "
                f"({_place(sign)})"
            )
        self._look_for_stall(now)

    def _look_for_stall(self, now: float) -> None:
        waited_s = now - self._since
        if self._step is None or waited_s < self._patience_s:
            return
        behind = self._behind()
        if not self._named:
            self._named = True
            self._say(f"step {self._step} takes {waited_s:.0f} s so far: {behind}")
        if waited_s > _STALLS * self._patience_s:
            self._blame(f"step {self._step} did not end in {waited_s:.0f} s: {behind}")

    def _behind(self) -> str:
        """Which processes have not begun the step that this one waits in."""
        signs = {number: self._read(number) for number in range(self._count)}
        late = [n for n, sign in signs.items() if sign and _step(sign) < (self._step or 0)]
        if late:
            names = ", ".join(f"process {n} ({_place(signs[n])})" for n in late[:4])
            return f"waiting for {names}{', ...' if len(late) > 4 else ''}"
        return "all processes have begun it, so a device or the network between them hangs"

    def _blame(self, what: str) -> None:
        line = f"{what}; the run ends here. Started again, it goes on from its newest checkpoint."
        scratch = self._folder / f"{_VERDICT}.{self._index}"
        scratch.write_text(line, encoding="utf-8")
        os.replace(scratch, self._folder / _VERDICT)
        self._leave(line)

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"process-{number:05d}"

    def _write(self) -> None:
        self._beat += 1
        scratch = self._folder / f".process-{self._index:05d}"
        step = -1 if self._step is None else self._step
        scratch.write_text(f"{self._beat} {step} {os.uname().nodename} {os.getpid()}")
        os.replace(scratch, self._path(self._index))

    def _read(self, number: int) -> str:
        """The last sign of a process, "" where there is none."""
        try:
            return self._path(number).read_text()
        except OSError:
            return ""


def _step(sign: str) -> int:
    return int(sign.split()[1])


def _place(sign: str) -> str:
    _, step, host, pid = sign.split()
    where = "between steps" if step == "-1" else f"in step {step}"
    return f"{where}, pid {pid} on {host}"
