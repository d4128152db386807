"""Two runs that all tests start from: one of 20 steps without a break, one stopped after step 6."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.e2e.small import Done, train


class Run(NamedTuple):
    """A workdir, for tests that only read or copy it, and how its run went."""

    workdir: Path
    done: Done


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of compiled programs for this session alone: its first run is cold."""
    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()  # it keeps to the folder it began with
    folder = tmp_path_factory.mktemp("compiled")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    yield folder
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> Run:
    """20 steps without a break."""
    workdir = tmp_path_factory.mktemp("straight") / "work"
    return Run(workdir, train(workdir))


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Run:
    """The same, stopped after step 6, with a trace of steps 2 and 3."""
    workdir = tmp_path_factory.mktemp("stopped") / "work"
    return Run(workdir, train(workdir, train__stop_at=6, profile__steps="2-3"))
