"""What a run is told before it starts: flags without effect, a run that is over, a useless base."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from moejax.cli.finetune import passes
from tests.cli.conftest import flags

LORA = {
    "lora__rank": 2, "lora__targets": ("q_b_proj",), "optim__qk_clip": 0.0, "log__loads_every": 0,
}  # fmt: skip
EXPERTS = {"model__ffn__num_dense_layers": 0}


def train(moejax, workdir: Path, **changes):
    return moejax("train", "--config=tiny", f"--workdir={workdir}", *flags(**changes))


@pytest.fixture
def before_training(monkeypatch):
    """Runs end where training would begin."""
    module = importlib.import_module("moejax.train.run")
    ended = module.TrainResult({}, None, 0, "not begun"), None
    monkeypatch.setattr(module, "_train", lambda *_: ended)


def test_adapters_over_random_weights_are_warned_of(moejax, before_training, tmp_path, run_dir):
    random = train(moejax, tmp_path / "work", **LORA)
    assert random.code == 0
    warned = [line for line in random.out.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and "lora.rank=2 without init_from" in warned[0]
    assert "--config.init_from=DIR" in warned[0]
    trained = train(moejax, tmp_path / "work", **LORA, init_from=str(run_dir))
    assert trained.code == 0 and "warning" not in trained.out


def test_balancing_under_adapters_is_told_to_have_no_effect(moejax, before_training, tmp_path):
    told = "router biases stay those of the base: model.moe.balance=quantile has no effect"
    shown = train(moejax, tmp_path / "work", **LORA, **EXPERTS)
    assert shown.code == 0 and told in shown.out
    assert told not in train(moejax, tmp_path / "work", **LORA).out  # no experts
    assert "router" not in train(moejax, tmp_path / "work", **EXPERTS).out
    asked = train(moejax, tmp_path / "work", **LORA, **EXPERTS, model__moe__balance="bias_step")
    assert asked.code == 2 and asked.err.count("\n") == 1
    assert "model.moe.balance=bias_step has no effect with lora.rank=2" in asked.err
    plain = train(moejax, tmp_path / "work", **LORA, **EXPERTS, model__moe__balance="none")
    assert plain.code == 0 and "router" not in plain.out


def test_flags_of_a_finished_run_are_told_to_have_no_effect(moejax, run_dir):
    same = train(moejax, run_dir, log__every=3)
    assert same.code == 0 and "is finished: step 2" in same.out and "note:" not in same.out
    other = train(moejax, run_dir, optim__lr=0.5, data__batch_size=16)
    assert other.code == 0 and "is finished: step 2" in other.out
    assert "without effect: data.batch_size=16 (was 8), optim.lr=0.5 (was 0.02)" in other.out


def test_a_stop_that_is_reached_is_told(moejax, run_dir):
    for stop_at in (1, 2):
        over = train(moejax, run_dir, train__num_steps=9, train__stop_at=stop_at)
        assert over.code == 0 and over.out.count("\n") == 1
        assert f"is at step 2, and train.stop_at={stop_at} is reached: nothing to do" in over.out


def test_adapters_that_are_off_are_named_by_field(moejax, tmp_path):
    refused = train(moejax, tmp_path / "work", **LORA | {"lora__rank": 0})
    assert refused.code == 2 and refused.err.count("\n") == 1
    assert "lora.targets=('q_b_proj',) has no effect: lora.rank=0" in refused.err


@pytest.mark.parametrize(
    ("seen", "rows", "epochs", "words"),
    [
        (480, 5330, 0, "480 of the 5,330 rows, once (9% of an epoch)"),
        (480, 160, 0, "3 epochs of 160 rows"),
        (480, 480, 0, "1 epoch of 480 rows"),
        (480, 320, 0, "1.5 epochs of 320 rows"),
        (304, 100, 3, "3 epochs of 100 rows"),
    ],
)
def test_how_often_a_run_passes_over_its_data(seen, rows, epochs, words):
    assert passes(seen, rows, epochs) == words
