"""The training step, the loop round it, and runs (level 6)."""

from moejax.train.run import TrainResult, run

__all__ = ["TrainResult", "run"]
