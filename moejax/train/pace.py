"""What a process does between two steps: waits for its batch, waits for its devices, the rest.

A step takes the same time on every host, since all wait for each other inside it. What differs is
what a host does beside waiting for its devices: whoever is late with a batch, or collects garbage,
is late with the next step and holds up all. That is counted here, and sent along with each step
(`Agreement`). A slow chip does not show here but in a profile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

# Of more processes the median and the last one are told, not each.
_MOST_LISTED = 64
# Behind the others: by this share of a step, and by this long at least.
_LATE_SHARE, _LATE_S = 0.1, 0.02


class Pace:
    """The seconds of this process since the last `lap`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forgets what was: compiling, evaluating and saving are no part of a step."""
        self._since, self._waited = self._clock(), {"data": 0.0, "devices": 0.0}

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A stretch of waiting, for "data" or "devices"."""
        began = self._clock()
        try:
            yield
        finally:
            self._waited[what] += self._clock() - began

    def lap(self) -> tuple[float, float]:
        """Ends a lap. Returns its seconds without those spent on the devices; waiting for data."""
        busy_s = self._clock() - self._since - self._waited["devices"]
        data_s = self._waited["data"]
        self.restart()
        return busy_s, data_s


def pace_row(laps_R2: np.ndarray, step_s: float) -> dict[str, Any]:
    """What a line of metrics says of the laps of all processes.

    Args:
      laps_R2: of each process what `Pace.lap` returned.
      step_s: seconds of a step.
    Returns:
      `busy_s`, `data_s`: of the process for which they are largest. With several processes also
      `rank_busy_s` and `rank_data_s`, a number for each (up to 64), and `straggler`: the number of
      the process that was busy longest, None unless it was so by a tenth of a step more than the
      median.
    """
    busy_R, data_R = laps_R2.T
    row: dict[str, Any] = {"busy_s": float(busy_R.max()), "data_s": float(data_R.max())}
    if len(busy_R) == 1:
        return row
    late_s = busy_R.max() - np.median(busy_R)
    late = late_s > max(_LATE_SHARE * step_s, _LATE_S)
    row["straggler"] = int(busy_R.argmax()) if late else None
    if len(busy_R) <= _MOST_LISTED:
        row |= {"rank_busy_s": busy_R.tolist(), "rank_data_s": data_R.tolist()}
    return row
