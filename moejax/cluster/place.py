"""A process's place in a run, and the environment variables that tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from moejax.config import ConfigError

# What `moejax launch` gives its processes, and a user's own script may.
COORDINATOR, NUM_PROCESSES, PROCESS_ID = (
    "MOEJAX_COORDINATOR", "MOEJAX_NUM_PROCESSES", "MOEJAX_PROCESS_ID",
)  # fmt: skip


class Membership(NamedTuple):
    """A process's place in a run.

    Attributes:
      coordinator: host:port of process 0.
      num_processes: how many there are.
      process_id: which one this is, from 0.
    """

    coordinator: str
    num_processes: int
    process_id: int

    def as_env(self) -> dict[str, str]:
        """Environment variables that `membership` reads."""
        names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
        return dict(zip(names, map(str, self), strict=True))


def membership(env: Mapping[str, str]) -> Membership | None:
    """The place that the environment names; None where it names none.

    Raises:
      ConfigError: it names a part of one, or something that is no place.
    """
    given = {name: env[name] for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if env.get(name)}
    if not given:
        return None
    missing = [n for n in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if n not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} without {', '.join(missing)}: give all three, or none of them."
        )
    count, number = given[NUM_PROCESSES], given[PROCESS_ID]
    if not (count.isdigit() and number.isdigit() and int(number) < int(count)):
        raise ConfigError(
            f"{PROCESS_ID}={number} of {NUM_PROCESSES}={count}: give a number of processes, and "
            "for each another number from 0 below it."
        )
    return Membership(address(given[COORDINATOR]), int(count), int(number))


def address(text: str) -> str:
    """The text, which must be host:port.

    Raises:
      ConfigError: it is not.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{COORDINATOR}={text}: give HOST:PORT of process 0, as 10.0.0.1:8476.")
    return text
