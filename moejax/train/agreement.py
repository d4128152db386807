"""A signal that reaches one process stops all of them after the same step."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.train.pace import Pace
from moejax.train.signals import StopRequest


class Agreement:
    """What the processes of a run tell each other with every step: the signal each has got.

    And how each spent the lap before (`Pace`). It travels in the step itself, so all read it from
    the metrics of one and the same step. Alone a process needs nobody, and the step is as it was.

    Attributes:
      laps: float32 [processes, 2], seconds busy and waiting for data, as of the last step read.
    """

    def __init__(self, mesh: Mesh, stop: StopRequest, pace: Pace | None = None):
        self._stop, self._several = stop, jax.process_count() > 1
        self._everywhere = NamedSharding(mesh, P(mesh.axis_names))
        self._here = len(mesh.local_devices)
        owners = [device.process_index for device in mesh.devices.flat]
        self._first = [owners.index(n) for n in sorted(set(owners))]
        self._told = 0
        self._pace = pace or Pace()
        self.laps = np.zeros((len(self._first), 2), np.float32)

    @property
    def signum(self) -> int | None:
        """The signal at which all stop, None without one."""
        return (self._told or None) if self._several else self._stop.signum

    @property
    def name(self) -> str:
        """Its name, or ""."""
        return signal.Signals(self.signum).name if self.signum else ""

    def vote(self) -> tuple[jax.Array, ...]:
        """What the step takes beside state and batch, for each device of this process: its signal
        (float32 holds the number), and its lap, which ends here.
        """
        lap = self._pace.lap()
        if not self._several:
            self.laps = np.array([lap], np.float32)
            return ()
        mine = np.tile(np.array([self._stop.signum or 0, *lap], np.float32), (self._here, 1))
        return (jax.make_array_from_process_local_data(self._everywhere, mine),)

    @staticmethod
    def counted(metrics: dict, *vote: jax.Array) -> dict:
        """Metrics of a step with what the processes said."""
        if not vote:
            return metrics
        said = jax.lax.with_sharding_constraint(vote[0], P())
        return metrics | {"signal": jnp.max(said[:, 0]), "laps": said[:, 1:]}

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Takes note of what a step's metrics say."""
        self._told = int(metrics.get("signal", 0)) or self._told
        if "laps" in metrics:
            self.laps = np.asarray(metrics["laps"])[self._first]
