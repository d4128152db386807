"""Whole runs that move their experts: the same losses and checkpoints; resumed, the same bits."""

import numpy as np
import pytest

from moejax.checkpoint import read_config
from tests.e2e.small import assert_same_bits, losses, position, rows, saved, train
from tests.sharded.meshes import relative_error

pytestmark = pytest.mark.slow

STEPS = 6
COMMON = {
    "train__num_steps": STEPS, "eval__every": 3, "checkpoint__every": 3, "log__tensorboard": False,
    "optim__ema_decay": 0.9, "model__moe__balance": "none", "fast": True,
}  # fmt: skip
MOVING = {"placement__every": 2, "placement__copies": 1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run whose experts stay, of one whose experts move, and of that one resumed."""
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "stays", **COMMON)
    done = train(folder / "moves", **COMMON, **MOVING)
    assert done.out.count("experts placed by") == 3
    train(folder / "resumed", **COMMON, **MOVING, train__stop_at=3)
    train(folder / "resumed", **COMMON, **MOVING)
    return folder


def test_losses_and_checkpoints_are_those_of_experts_that_stay(runs):
    np.testing.assert_allclose(losses(runs / "moves"), losses(runs / "stays"), rtol=1e-4)
    for step in (3, STEPS):
        got, want = saved(runs / "moves", step), saved(runs / "stays", step)
        assert got.keys() == want.keys()
        worst = max((relative_error(got[name], want[name]), name) for name in want)
        assert worst[0] <= 1e-3, worst
    evaluated = [row["eval_loss"] for row in rows(runs / "moves") if row["eval_loss"]]
    np.testing.assert_allclose(
        evaluated, [row["eval_loss"] for row in rows(runs / "stays") if row["eval_loss"]], rtol=1e-4
    )


def test_a_resumed_run_moves_its_experts_alike(runs):
    assert losses(runs / "resumed") == losses(runs / "moves")
    assert_same_bits(saved(runs / "resumed", STEPS), saved(runs / "moves", STEPS))
    assert position(runs / "resumed", STEPS) == position(runs / "moves", STEPS)


def test_the_metrics_say_how_full_the_fullest_device_is(runs):
    for row in rows(runs / "moves"):
        assert all(1 <= load <= 4 for load in row["moe_device_load_max"])
    slots = np.array(position(runs / "moves", STEPS)["placement"]["slots"])
    assert np.any(slots != np.arange(slots.shape[1]))


def test_a_run_without_placement_goes_on_from_one_with(runs):
    config = read_config(runs / "moves")
    assert config["placement"]["every"] == 2
    train(runs / "moves", **COMMON | {"train__num_steps": STEPS + 1})
    train(runs / "stays", **COMMON | {"train__num_steps": STEPS + 1})
    np.testing.assert_allclose(
        losses(runs / "moves", STEPS + 1, STEPS + 1),
        losses(runs / "stays", STEPS + 1, STEPS + 1),
        rtol=1e-4,
    )
