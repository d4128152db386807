"""Bad steps: stop, skip, go back; the batch that is kept, and what its replay says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cli.main import main
from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.train import bad_steps, diagnose, loop, replay, step
from moejax.train.bad_steps import BadSteps, Rewind, bad_batches, read_batch
from moejax.train.diagnose import NonFiniteError
from tests.cli.conftest import SMALL, flags
from tests.e2e.small import assert_same_bits, losses, rows, saved, steps_on_disk, train

STEPS, BAD = 8, 5
SETTINGS = SMALL | {
    "train.num_steps": STEPS, "checkpoint.every": 2, "checkpoint.keep": 9, "eval.every": 0,
    "optim.schedule": "constant", "optim.warmup_fraction": 0.0, "mesh.fsdp": 1, "mesh.data": -1,
}  # fmt: skip


def _train(workdir: Path, **changes):
    return train(workdir, "tiny", SETTINGS, fast=True, **changes)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> tuple[Path, list[int]]:
    """The run without a fault, and the sum of the tokens of each of its batches."""
    workdir, sums, put = tmp_path_factory.mktemp("straight") / "work", [], loop.put_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "put_batch", lambda p, b, n: sums.append(_sum(b)) or put(p, b, n))
        _train(workdir)
    return workdir, sums


def _sum(batch) -> int:
    return int(batch["tokens"].sum())


def _fault(patch: pytest.MonkeyPatch, bad_sums: list[int], kind: str = "gradient") -> None:
    """From now on these batches have a gradient with a NaN, or ten times the loss."""
    real = step.gradients

    def spoilt(program, state, batch):
        grads, measured = real(program, state, batch)
        hit = jnp.any(jnp.sum(batch["tokens"]) == jnp.array(bad_sums))
        if kind == "loss":
            return grads, measured | {"loss": jnp.where(hit, 10.0, 1.0) * measured["loss"]}
        leaves, tree = jax.tree.flatten(grads)
        leaves[1] = jnp.where(hit, leaves[1].at[(0,) * leaves[1].ndim].set(jnp.nan), leaves[1])
        return jax.tree.unflatten(tree, leaves), measured

    for module in (step, diagnose, replay):
        patch.setattr(module, "gradients", spoilt)


@pytest.fixture(scope="module")
def skipped(straight, tmp_path_factory) -> Path:
    """The run that leaves out batch 5."""
    workdir = tmp_path_factory.mktemp("skipped") / "work"
    with pytest.MonkeyPatch.context() as patch:
        _fault(patch, [straight[1][BAD - 1]])
        out = _train(workdir, train__bad_step="skip", checkpoint__every=1).out
    assert f"step {BAD}: gradient norm nan, not applied (1 of at most 10)" in out
    return workdir


def test_a_skipped_step_changes_nothing_but_its_number(straight, skipped):
    before, after = saved(skipped, BAD - 1), saved(skipped, BAD)
    assert before.pop("rest/step") == BAD - 1 and after.pop("rest/step") == BAD
    assert_same_bits(before, after)
    assert losses(skipped, last=BAD) == losses(straight[0], last=BAD)
    assert losses(skipped, BAD + 1) != losses(straight[0], BAD + 1)
    assert rows(skipped)[-1]["step"] == STEPS and rows(skipped)[BAD - 1]["grad_norm"] is None


def test_the_run_goes_back_and_on_behind_the_batch(straight, skipped, tmp_path, monkeypatch):
    _fault(monkeypatch, [straight[1][BAD - 1]])
    work = tmp_path / "work"
    done = _train(work, train__bad_step="rewind")
    assert f"step {BAD}: gradient norm nan (batch kept in {work / 'bad_steps'}" in done.out
    assert f": back to {work / 'checkpoints' / '4'}, and on behind its batch (1 of" in done.out
    assert [row["step"] for row in rows(work)] == list(range(1, STEPS + 1))
    # Batch 5 left out in both: what one run calls step 6 the other calls step 5.
    assert losses(work, BAD, STEPS - 1) == losses(skipped, BAD + 1, STEPS)
    assert steps_on_disk(work) == [2, 4, 6, 8]


@pytest.mark.slow
def test_without_a_checkpoint_it_goes_back_to_the_beginning(straight, tmp_path, monkeypatch):
    _fault(monkeypatch, straight[1][:1])
    done = _train(tmp_path / "work", train__bad_step="rewind", train__num_steps=2)
    assert ": back to the beginning, and on behind its batch (1 of at most 10)" in done.out
    assert rows(tmp_path / "work")[-1]["step"] == 2


@pytest.mark.slow
def test_the_batch_that_stops_a_run_is_kept_and_replayed(straight, tmp_path, monkeypatch, capsys):
    work = tmp_path / "work"
    with pytest.MonkeyPatch.context() as patch:
        _fault(patch, [straight[1][BAD - 1]])
        with pytest.raises(NonFiniteError, match=r"norm nan at step 5: .*gradient of .*kept in"):
            _train(work)
        (folder,) = bad_batches(work)
        report, batch = read_batch(folder)
        assert report["step"] == BAD and "gradient of" in report["first_bad_tensor"]
        assert _sum(batch) == straight[1][BAD - 1]
        capsys.readouterr()
        assert main(["replay", f"--workdir={work}"]) == 3
        out = capsys.readouterr().out
    assert "at the state after step 4" in out and "1 of " in out and ": 1 NaN, 0 infinite" in out
    assert report["first_bad_tensor"] in out
    # Without the fault the batch is as good as any other.
    assert (
        main(["replay", f"--workdir={work}", "--batch=step-00000005", "--config.train.remat=auto"])
        == 0
    )
    out = capsys.readouterr().out
    assert f"loss {losses(straight[0])[BAD - 1]:.6g}, gradient norm" in out


@pytest.mark.slow
def test_a_spike_is_not_applied(straight, tmp_path, monkeypatch):
    _fault(monkeypatch, [straight[1][BAD - 1]], "loss")
    spikes = {"train__spike_factor": 3.0, "train__spike_window": 2, "train__bad_step": "skip"}
    done = _train(tmp_path / "work", **spikes)
    assert f"step {BAD}: loss " in done.out and "above the limit" in done.out
    known = losses(straight[0], BAD - 3, BAD - 2)  # what is known two steps before
    (folder,) = bad_batches(tmp_path / "work")
    report = json.loads((folder / bad_steps.REPORT).read_text())
    assert report["limit"] == pytest.approx(3 * sum(known) / 2, rel=1e-6)
    assert losses(tmp_path / "work", BAD + 1) != losses(straight[0], BAD + 1)


@pytest.mark.slow
def test_watching_changes_no_bit(straight, tmp_path):
    """Where no step is bad, a run that watches for spikes is the run that does not."""
    watch = {"train__spike_factor": 5.0, "train__spike_window": 2, "train__bad_step": "skip"}
    _train(tmp_path / "work", **watch)
    assert losses(tmp_path / "work") == losses(straight[0])
    assert_same_bits(saved(tmp_path / "work", STEPS), saved(straight[0], STEPS))


def _steps(tmp_path, **changes) -> BadSteps:
    cfg = load_config("tiny", SMALL | changes)
    return BadSteps(cfg.train, make_mesh(cfg.mesh), tmp_path)


def test_the_limit_knows_what_a_resumed_run_knows(tmp_path):
    watch = _steps(tmp_path, **{"train.spike_factor": 2.0, "train.spike_window": 3})
    assert watch.limit(1) == math.inf
    for at in range(1, 8):
        watch.good(at, float(at))
    assert watch.limit(4) == math.inf  # two losses are old enough
    assert watch.limit(8) == 2.0 * 5  # of 4, 5 and 6, whether or not 7 is known
    saved_as = json.loads(json.dumps(watch.position()))
    again = BadSteps(watch._cfg, make_mesh(load_config("tiny", SMALL).mesh), tmp_path, saved_as)
    assert again.limit(8) == watch.limit(8) and again.limit(9) == watch.limit(9)


def test_too_many_end_the_run(tmp_path):
    watch = _steps(tmp_path, **{"train.bad_step": "skip", "train.bad_step_limit": 1})
    assert watch.next(3, "loss nan", "kept", {}, "") == (
        "step 3: loss nan, not applied (1 of at most 1); batch kept"
    )
    with pytest.raises(NonFiniteError, match="bad step 2 of this run, more than"):
        watch.next(4, "loss nan", "kept", {}, "")
    back = _steps(tmp_path, **{"train.bad_step": "rewind"})
    with pytest.raises(Rewind) as raised:
        back.next(3, "loss nan", "kept", {"rows": 24}, "")
    assert raised.value.data == {"rows": 24} and raised.value.count == 1


def test_a_batch_that_cannot_be_kept_ends_nothing(tmp_path):
    watch = _steps(tmp_path)
    watch.folder.parent.joinpath(bad_steps.FOLDER).write_text("a file")
    kept = watch.keep(3, {"tokens": np.zeros((1, 2), np.int32)}, {"data": {"rows": 8}})
    assert kept.startswith("not kept (")


def test_what_cannot_be_asked_is_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="would call every other step bad"):
        load_config("tiny", {"train.spike_factor": 0.9})
    assert main(["replay", "--config=tiny", f"--workdir={tmp_path}", *flags()]) == 2
    error = capsys.readouterr().err
    assert "has no bad batch; it has none" in error and error.count("\n") == 1
