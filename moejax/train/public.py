"""`moejax.train(config, workdir)`: one call, a whole run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from moejax.config.load import as_run_config
from moejax.train.run import TrainResult, run


def train(
    config: Any, workdir: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None
) -> TrainResult:
    """Trains, resuming whatever `workdir` holds.

    Args:
      config: a RunConfig, nested mappings, a ConfigDict, the name of a shipped config ("tiny"), the
        path of a config file, or the folder of a run.
      workdir: folder of checkpoints, metrics and tokenizer; made if missing.
      overrides: dotted field -> value, such as {"train.num_steps": 50}.
    Returns:
      The last metrics, the newest checkpoint, the step reached and why the run ended.
    Raises:
      ConfigError: settings, data or checkpoint that cannot be used; nothing was changed.
    """
    named = isinstance(config, str | os.PathLike)
    name, changed = (os.fspath(config), overrides) if named else ("", None)
    return run(as_run_config(config, overrides), workdir, name=name, overrides=changed)


class _CallablePackage(ModuleType):
    """`moejax.train` is a package, and also the function users call: it is both."""

    def __call__(
        self,
        config: Any,
        workdir: str | os.PathLike[str],
        overrides: Mapping[str, Any] | None = None,
    ) -> TrainResult:
        return train(config, workdir, overrides)


_CallablePackage.__call__.__doc__ = train.__doc__


def make_callable(package: str) -> None:
    """Lets the imported module of this name be called as :func:`train`."""
    sys.modules[package].__class__ = _CallablePackage
