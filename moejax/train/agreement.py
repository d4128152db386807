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

from moejax.train.signals import StopRequest


class Agreement:
    """What the processes of a run tell each other with every step: the signal each has got.

    It travels in the step itself, so all read it from the metrics of one and the same step. Alone a
    process needs nobody, and the step is as it was.
    """

    def __init__(self, mesh: Mesh, stop: StopRequest):
        self._stop, self._several = stop, jax.process_count() > 1
        self._everywhere = NamedSharding(mesh, P(mesh.axis_names))
        self._here = len(mesh.local_devices)
        self._told = 0

    @property
    def signum(self) -> int | None:
        """The signal at which all stop, None without one."""
        return (self._told or None) if self._several else self._stop.signum

    @property
    def name(self) -> str:
        """Its name, or ""."""
        return signal.Signals(self.signum).name if self.signum else ""

    def vote(self) -> tuple[jax.Array, ...]:
        """What the step takes beside state and batch: this process's signal, for each device."""
        if not self._several:
            return ()
        mine = np.full(self._here, self._stop.signum or 0, np.int32)
        return (jax.make_array_from_process_local_data(self._everywhere, mine),)

    @staticmethod
    def counted(metrics: dict, *vote: jax.Array) -> dict:
        """Metrics of a step with what the processes said."""
        return metrics | ({"signal": jnp.max(vote[0])} if vote else {})

    def read(self, metrics: Mapping[str, Any]) -> None:
        """Takes note of what a step's metrics say."""
        self._told = int(metrics.get("signal", 0)) or self._told
