"""Saving, checking and restoring a run's state, and the byte level of Hugging Face weights."""

from moejax.checkpoint.hf_folder import HfFolder, HfWriter
from moejax.checkpoint.layout import FORMAT_VERSION, CheckpointError, locate
from moejax.checkpoint.local import LocalCheckpoints
from moejax.checkpoint.manager import Checkpoints, Restored
from moejax.checkpoint.reader import has_part, read_config
from moejax.checkpoint.streamed import StreamedCheckpoint, read_carried

__all__ = [
    "FORMAT_VERSION",
    "CheckpointError",
    "Checkpoints",
    "HfFolder",
    "HfWriter",
    "LocalCheckpoints",
    "Restored",
    "StreamedCheckpoint",
    "has_part",
    "locate",
    "read_carried",
    "read_config",
]
