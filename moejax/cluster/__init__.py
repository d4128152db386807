"""Processes that make one run together: finding the others, starting and watching them."""

from moejax.cluster.detect import Detected, detect
from moejax.cluster.join import join, meet
from moejax.cluster.local import Supervisor
from moejax.cluster.place import Membership, membership

__all__ = ["Detected", "Membership", "Supervisor", "detect", "join", "meet", "membership"]
