"""Train the Kimi-K3 family of mixture-of-experts models in JAX and Flax nnx.

`moejax.train(config, workdir)` is a whole run. Importing this package is light: JAX is imported
when training is asked for, so that a program may still set devices and platforms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moejax.config import ConfigError, RunConfig
from moejax.version import __version__

if TYPE_CHECKING:
    from moejax import train
    from moejax.train import TrainResult

__all__ = ["ConfigError", "RunConfig", "TrainResult", "__version__", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # the package of that name, which can be called
        return importlib.import_module("moejax.train")
    if name == "TrainResult":
        return importlib.import_module("moejax.train").TrainResult
    raise AttributeError(f"module 'moejax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
