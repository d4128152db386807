"""Saving, checking and restoring a run's state (level 5)."""

from moejax.checkpoint.layout import FORMAT_VERSION, CheckpointError, locate
from moejax.checkpoint.manager import Checkpoints, Restored
from moejax.checkpoint.reader import read_config

__all__ = [
    "FORMAT_VERSION",
    "CheckpointError",
    "Checkpoints",
    "Restored",
    "locate",
    "read_config",
]
