"""A profiler trace of a window of steps, for xprof."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax

from moejax.config import ProfileConfig
from moejax.observability.metrics import unwritable


class StepProfiler:
    """Traces the steps `profile.steps` names to `<workdir>/profile`.

    Call `before(step)` and `after(step, outputs)` round every step and `close()` at the end.
    Starting and ending a trace takes seconds: `starts` and `ends` tell at which steps.
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
        self._window = cfg.window()
        self._say = say
        self._annotation: Any = None
        self._tracing = self._done = False

    def starts(self, step: int) -> bool:
        """Whether `before` of this step starts the trace."""
        return self._window is not None and not self._tracing and self._covers(step)

    def ends(self, step: int) -> bool:
        """Whether `after` of this step ends the trace."""
        return self._window is not None and self._tracing and step >= self._window[1]

    def _covers(self, step: int) -> bool:
        window = self._window
        return window is not None and not self._done and window[0] <= step <= window[1]

    def before(self, step: int) -> None:
        """Starts the trace at the first step of the window, or inside it after a resume."""
        if not self._covers(step):
            return
        if not self._tracing:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(self.path, error) from error
            jax.profiler.start_trace(str(self.path))
            self._tracing = True
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after(self, step: int, outputs: Any = None) -> None:
        """Stops the trace after the last step of the window, once `outputs` are computed."""
        if not self._tracing or self._window is None:
            return
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self.ends(step):
            jax.block_until_ready(outputs)
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing, self._done = False, True
        self._say(f"profile: {self.path} (open with: xprof {self.path})")

    def close(self) -> None:
        """Stops a trace still running; says so when the window was never reached."""
        if self._tracing and self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._tracing:
            self._stop()
        elif self._window is not None and not self._done:
            first, last = self._window
            self._say(f"profile.steps={first}-{last} had no effect: the run did not reach it.")
            self._done = True
