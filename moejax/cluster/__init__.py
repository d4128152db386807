"""Processes that make one run together: finding the others, starting and watching them."""

from moejax.cluster.detect import Detected, detect
from moejax.cluster.join import join, meet
from moejax.cluster.leave import TRY_AGAIN, code_of, leaving_together
from moejax.cluster.local import Supervisor
from moejax.cluster.place import Membership, membership
from moejax.cluster.watchdog import Watchdog

__all__ = [
    "TRY_AGAIN",
    "Detected",
    "Membership",
    "Supervisor",
    "Watchdog",
    "code_of",
    "detect",
    "join",
    "leaving_together",
    "meet",
    "membership",
]
