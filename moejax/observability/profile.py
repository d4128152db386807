"""Profiler traces of some steps, for xprof: those of the config, and the next ones at a signal."""

from __future__ import annotations

import pathlib
import signal
import threading
from collections.abc import Callable
from typing import Any

import jax

from moejax.config import ProfileConfig
from moejax.observability.metrics import unwritable

SIGNAL = signal.SIGUSR1


class StepProfiler:
    """Traces the steps of `profile.steps` to `<workdir>/profile`, and the next ones at SIGUSR1.

    Call `before(step)` and `after(step, outputs)` round every step and `close()` at the end.
    Starting and ending a trace takes seconds: `starts` and `ends` tell at which steps. Of several
    processes each traces its own devices, into a folder of its own; a signal is obeyed by those
    that get it.
    """

    def __init__(
        self,
        cfg: ProfileConfig,
        workdir: str | pathlib.Path,
        say: Callable[[str], Any] = print,
    ):
        """
        Args:
          cfg: the `profile` section.
          workdir: the run's folder.
          say: takes the lines meant for the user.
        """
        self.path = pathlib.Path(workdir) / "profile"
        if jax.process_count() > 1:  # hosts with several would write the same file
            self.path /= f"process-{jax.process_index():05d}"
        self._left = cfg.windows()
        self._at_signal = cfg.steps_at_signal
        self._say = say
        self._annotation: Any = None
        self._tracing: tuple[int, int] | None = None
        self._asked = False
        self._old: Any = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.signal(SIGNAL, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def starts(self, step: int) -> bool:
        """Whether `before` of this step starts a trace."""
        return self._tracing is None and self._window(step) is not None

    def ends(self, step: int) -> bool:
        """Whether `after` of this step ends the trace."""
        return self._tracing is not None and step >= self._tracing[1]

    def _window(self, step: int) -> tuple[int, int] | None:
        """The steps to trace from this one on."""
        if self._asked:
            return step, step + self._at_signal - 1
        return next((w for w in self._left if w[0] <= step <= w[1]), None)

    def before(self, step: int) -> None:
        """Starts the trace at the first step of a window, or inside it after a resume."""
        if self._tracing is None:
            window = self._window(step)
            if window is None:
                return
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(self.path, error) from error
            jax.profiler.start_trace(str(self.path))
            self._tracing, self._asked = window, False
            self._left = [w for w in self._left if not w[0] <= step <= w[1]]
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after(self, step: int, outputs: Any = None) -> None:
        """Stops the trace after the last step of the window, once `outputs` are computed."""
        if self._tracing is None:
            return
        self._end_annotation()
        if self.ends(step):
            jax.block_until_ready(outputs)
            self._stop()

    def _end_annotation(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = None
        self._say(f"profile: {self.path} (open with: xprof {self.path})")

    def close(self) -> None:
        """Stops a trace still running; says which windows were never reached."""
        if self._old is not None:
            signal.signal(SIGNAL, self._old)
            self._old = None
        if self._tracing is not None:
            self._end_annotation()
            self._stop()
        for first, last in self._left:
            self._say(f"profile.steps={first}-{last} had no effect: the run did not reach it.")
        self._left = []
