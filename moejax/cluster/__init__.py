"""Processes that make one run together: finding the others, starting and watching them."""

from moejax.cluster.join import Membership, join, meet, membership
from moejax.cluster.local import Supervisor

__all__ = ["Membership", "Supervisor", "join", "meet", "membership"]
