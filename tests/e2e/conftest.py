"""Two runs that all tests start from: one of 20 steps without a break, one stopped after step 6.

The first also evaluates further sets and continues prompts. Every test that holds another run to
its bits so says that these change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from moejax.train.samples import Samples
from tests.e2e.small import TEXT, Done, train

PROMPTS = ("def ", "")
BESIDE: dict[str, Any] = {
    "eval__sets": (
        {"name": "stocks", "paths": (f"{TEXT}/stock_*.md",)},
        {"name": "held_out", "paths": (f"{TEXT}/*.txt", f"{TEXT}/*.md"), "split": "validation",
         "validation_percent": 10.0},
    ),
    "samples__prompts": PROMPTS, "samples__every": 8, "samples__max_new_tokens": 5,
}  # fmt: skip


class Run(NamedTuple):
    """A workdir, for tests that only read or copy it, and how its run went."""

    workdir: Path
    done: Done
    sampled_s: list[float]  # seconds of each sampling, the first with its compilation


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
    workdir, seconds, sample = tmp_path_factory.mktemp("straight") / "work", [], Samples.__call__

    def timed(self, *args):
        self.generator.compiler_options = {"xla_backend_optimization_level": 0}
        began = time.perf_counter()
        texts = sample(self, *args)
        seconds.append(time.perf_counter() - began)
        return texts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Samples, "__call__", timed)
        return Run(workdir, train(workdir, **BESIDE), seconds)


@pytest.fixture(scope="session")
def stopped(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Run:
    """The same, stopped after step 6, with a trace of steps 2 and 3."""
    workdir = tmp_path_factory.mktemp("stopped") / "work"
    return Run(workdir, train(workdir, train__stop_at=6, profile__steps="2-3"), [])
