"""The training step, the loop round it, and runs (level 6)."""

from moejax.train.public import make_callable, train
from moejax.train.run import TrainResult, run

__all__ = ["TrainResult", "run", "train"]

make_callable(__name__)
