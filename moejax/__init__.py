"""Train and use the Kimi-K3 family of mixture-of-experts models in JAX and Flax nnx.

`moejax.train(config, workdir)` is a whole run; `moejax.load(path)` is a model to call: of a run, of
an import, or of a Hugging Face folder. Importing this package is light: JAX is imported when either
is asked for, so that a program may still set devices and platforms.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moejax.config import ConfigError, RunConfig
from moejax.version import __version__

if TYPE_CHECKING:
    from moejax import train
    from moejax.generate import LanguageModel, load
    from moejax.train import TrainResult

__all__ = [
    "ConfigError", "LanguageModel", "RunConfig", "TrainResult", "__version__", "load", "train",
]  # fmt: skip

_FROM = {"TrainResult": "train", "LanguageModel": "generate", "load": "generate"}


def __getattr__(name: str) -> Any:
    if name == "train":  # the package of that name, which can be called
        return importlib.import_module("moejax.train")
    if name in _FROM:
        return getattr(importlib.import_module(f"moejax.{_FROM[name]}"), name)
    raise AttributeError(f"module 'moejax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
