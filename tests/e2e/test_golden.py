"""The first 20 steps against recorded losses.

`python -m tests.golden.record --help` says how to record them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.small import train
from tests.golden import record


def _assert_on(curve: dict, golden: dict | None) -> None:
    assert golden is not None and len(golden["losses"]) >= record.FIRST_STEPS
    assert curve["tokenizer_sha256"] == golden["tokenizer_sha256"]
    np.testing.assert_allclose(
        curve["losses"], golden["losses"][: len(curve["losses"])], rtol=record.TOLERANCE
    )


def test_small_model_on_the_fixture_text(straight):
    curve = record.curve(straight.workdir)
    _assert_on(curve, record.kept("small", curve["corpus_sha256"]))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, compile_cache: Path) -> dict:
    """The first 20 steps of `--config=tiny` on this Python's standard library."""
    workdir = tmp_path_factory.mktemp("tiny") / "work"
    train(workdir, "tiny", {}, train__stop_at=20, eval__every=0, checkpoint__every=0,
          log__progress=False, log__tensorboard=False)  # fmt: skip
    return record.curve(workdir)


@pytest.mark.slow
def test_tiny_starts_where_width_and_vocabulary_say(tiny):
    """Logits of a random head on RMS 1 states have variance D std^2: loss = ln V + D std^2 / 2."""
    assert tiny["losses"][0] == pytest.approx(math.log(512) + 64 * 0.02**2 / 2, rel=0.01)


@pytest.mark.slow
def test_tiny_learns_as_recorded(tiny):
    """To 1e-3 where the library is the recorded one; anywhere it learns from the first steps on."""
    assert len(tiny["losses"]) == record.FIRST_STEPS
    assert tiny["losses"][-1] < tiny["losses"][0] - 0.5
    golden = record.kept("tiny", tiny["corpus_sha256"])
    if golden is not None:
        _assert_on(tiny, golden)
