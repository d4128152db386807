"""Several processes on this machine as one job: started, watched and ended together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, Any

from moejax.cluster.leave import TRY_AGAIN
from moejax.cluster.place import Membership

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05
_NOISE = "[Gloo] Rank"  # what the collectives' library prints at every group of processes


class Supervisor:
    """Runs a command in several processes that join each other.

    The first process has the terminal: its output is the job's. What the others print goes to
    their logs, and what they write to stderr also to ours, each line with the process's number.
    """

    def __init__(
        self, command: Sequence[str], num_processes: int, *, logs: pathlib.Path | None = None,
        grace_s: float = 60.0, fail_grace_s: float = 10.0, say: Callable[[str], Any] = print,
    ):  # fmt: skip
        """
        Args:
          command: the program and its arguments, the same for all.
          num_processes: how many.
          logs: folder for one file a process, `process-00001.log`; None for none.
          grace_s: what they get to end by themselves after a signal.
          fail_grace_s: what the others get when one has failed, at most `grace_s`; they are stuck.
          say: takes lines about processes that end.
        """
        self.command, self.num_processes = list(command), num_processes
        self.logs, self.grace_s, self.say = logs, grace_s, say
        self.fail_grace_s = min(fail_grace_s, grace_s)
        self.processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._signals: list[int] = []

    def run(self) -> int:
        """Starts the processes and waits for them.

        Returns:
          0 when all of them ended well, else the exit code of the first that did not, 128 + the
          signal of one that was killed.
        """
        place = f"127.0.0.1:{_free_port()}"
        handlers = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._pass_on)
        try:
            for number in range(self.num_processes):
                self._start(Membership(place, self.num_processes, number))
            return self._watch()
        finally:
            self._end_all()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    @property
    def signalled(self) -> bool:
        """Whether a signal asked for the end."""
        return bool(self._signals)

    def _note(self, signum: int, _: Any) -> None:
        self._signals.append(signum)

    def _pass_on(self, signum: int, _: Any) -> None:
        """What asks for something else than the end: a profiler trace."""
        _signal_all([p for p in self.processes if p.poll() is None], signum)

    def _start(self, place: Membership) -> None:
        alone = place.process_id == 0 and self.logs is None
        pipe = None if alone else subprocess.PIPE
        process = subprocess.Popen(
            self.command, env=os.environ | place.as_env(), stdout=pipe, stderr=pipe, text=True,
            errors="replace", start_new_session=True, preexec_fn=_prepare,
        )  # fmt: skip
        self.processes.append(process)
        log = self._open_log(place.process_id)
        lock = threading.Lock()  # both streams of a process write to its log
        for stream, ours in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is None:
                continue
            shown = ours if place.process_id == 0 or stream is process.stderr else None
            args = (stream, shown, log, lock, place.process_id)
            reader = threading.Thread(target=_copy, args=args, daemon=True)
            reader.start()
            self._readers.append(reader)

    def _open_log(self, number: int) -> IO[str] | None:
        if self.logs is None:
            return None
        self.logs.mkdir(parents=True, exist_ok=True)
        # behind what is there: a restart must not take away why it was needed
        return open(self.logs / f"process-{number:05d}.log", "a", buffering=1)

    def _watch(self) -> int:
        """Until all have ended; when one fails, the others are asked to, then made to."""
        code, deadline, sent, grace_s = 0, float("inf"), 0, self.grace_s
        while running := [p for p in self.processes if p.poll() is None]:
            if not code and not sent and (failed := self._failed()):
                number, ended = failed
                code, grace_s = _exit_code(ended), self.fail_grace_s
                self.say(f"process {number} ended {_in_words(ended)}; ending the others")
                deadline = time.monotonic() + grace_s
                _signal_all(running, signal.SIGTERM)
            if len(self._signals) > sent:
                _signal_all(running, self._signals[sent])
                sent += 1
                grace_s = self.grace_s
                deadline = time.monotonic() + grace_s
            if time.monotonic() > deadline:
                self.say(f"{len(running)} processes did not end in {grace_s:g} s: killed")
                _signal_all(running, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(_POLL_S)
        failed = self._failed()
        if failed and not code and not sent:  # all at once, before we looked
            self.say(f"process {failed[0]} ended {_in_words(failed[1])}")
        return code or (_exit_code(failed[1]) if failed else 0)

    def _failed(self) -> tuple[int, int] | None:
        """Number and end of a process that failed, None where none has.

        Of several the one that the others left for.
        """
        ends = [(number, process.poll()) for number, process in enumerate(self.processes)]
        failed = [(number, ended) for number, ended in ends if ended]
        return min(failed, key=lambda end: end[1] == TRY_AGAIN, default=None)

    def _end_all(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for reader in self._readers:
            reader.join(timeout=5)


def _copy(stream: IO[str], shown: IO[str] | None, log: IO[str] | None, lock, number: int) -> None:
    """Lines of a process to its log and, with its number if it is not the first, to ours."""
    for line in stream:
        if log is not None:
            try:
                with lock:
                    log.write(line)
            except OSError:  # a full disk; a reader that gave up would block the process
                log = None
        if shown is not None and not line.startswith(_NOISE):
            shown.write(line if number == 0 else f"[{number}] {line}")
            shown.flush()


def _signal_all(processes: Sequence[subprocess.Popen[str]], signum: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)


def _prepare() -> None:
    """In a new process: the kernel ends it when the one that watches it is gone; Linux only.

    A signal that asks for a profiler trace does not end it while it still starts.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit_code(ended: int) -> int:
    return ended if ended >= 0 else 128 - ended


def _in_words(ended: int) -> str:
    return f"with exit code {ended}" if ended >= 0 else f"by {signal.Signals(-ended).name}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
