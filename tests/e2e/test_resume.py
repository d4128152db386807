"""A run that was stopped goes on: to the same bits, on another mesh, or changed on purpose."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from moejax.checkpoint import Checkpoints
from moejax.checkpoint.layout import named_leaves
from moejax.config.load import load_config
from moejax.observability import read_loads
from moejax.partitioning import make_mesh
from moejax.train.run import restore_or_init
from moejax.train.state import as_tree, build_program
from tests.e2e.small import (
    PATIENCE_S,
    SMALL,
    STEP_TOKENS,
    STEPS,
    assert_same_bits,
    command,
    copied,
    flags,
    losses,
    position,
    rows,
    saved,
    steps_on_disk,
    train,
)


def test_going_on_repeats_the_unbroken_run_bit_for_bit(straight, stopped, tmp_path):
    """14 more steps: every loss, every array of the state, the data position; one line a step."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    assert losses(workdir) == losses(straight.workdir, last=6)
    done = train(workdir)
    assert f"resuming from {workdir / 'checkpoints' / '6'}" in done.out
    assert done.loop.compiled.traces == [1] and done.loop.compiled.cache == "warm"
    assert [row["step"] for row in rows(workdir)] == list(range(1, STEPS + 1))
    for name in ("loss", "eval_loss", "grad_norm", "tokens", "moe_load_max", "indexer_kl"):
        assert [r[name] for r in rows(workdir)] == [r[name] for r in rows(straight.workdir)], name
    assert position(workdir, STEPS) == position(straight.workdir, STEPS)
    assert position(workdir, STEPS)["data"]["rows"] == STEPS * SMALL["data.batch_size"]
    _assert_same_loads(workdir, straight.workdir, last=STEPS)
    state = saved(workdir, STEPS)
    assert_same_bits(state, saved(straight.workdir, STEPS))
    assert {name.split("/")[1] for name in state if name.startswith("rest/")} == {
        "balance", "opt_state", "rng", "step"
    }  # fmt: skip


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(straight, stopped, tmp_path):
    """One bit of the newest step flipped: on from the step before, to the same bits."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    newest = workdir / "checkpoints" / "6"
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = train(workdir, train__stop_at=8)
    flaw = f"file {victim.relative_to(newest)} does not match its checksum"
    assert f"warning: checkpoint {newest} is damaged ({flaw})" in done.out
    assert f"resuming from {workdir / 'checkpoints' / '4'}" in done.out
    assert losses(workdir) == losses(straight.workdir, last=8)
    assert_same_bits(saved(workdir, 8), saved(straight.workdir, 8))
    _assert_same_loads(workdir, straight.workdir, last=8)


def _assert_same_loads(workdir: Path, straight: Path, last: int) -> None:
    """Counts of every step to `last`, each in one record, and those of the unbroken run."""
    found, wanted = read_loads(workdir), read_loads(straight)
    covered = [s for a, b in zip(found.first, found.steps, strict=True) for s in range(a, b + 1)]
    assert covered == list(range(1, last + 1))
    until = wanted.counts[wanted.steps <= last]
    np.testing.assert_array_equal(found.counts.sum(0), until.sum(0))
    assert (found.counts.sum((0, 2)) == last * STEP_TOKENS * SMALL["model.moe.top_k"]).all()


def _assert_agrees(workdir: Path, straight: Path) -> None:
    """Losses of steps 7 and 8 and the weights after them, to 1e-5 of the largest in an array."""
    assert losses(workdir, 1, 6) == losses(straight, 1, 6)
    np.testing.assert_allclose(losses(workdir, 7, 8), losses(straight, 7, 8), rtol=1e-5)
    found, wanted = saved(workdir, 8), saved(straight, 8)
    for name in (name for name in wanted if name.startswith("params/")):
        error, size = np.abs(found[name] - wanted[name]).max(), np.abs(wanted[name]).max()
        assert error <= 1e-5 * size, f"{name}: {error / size:.1e}"


@pytest.mark.parametrize(
    "mesh",
    [
        (2, 2, 2),
        pytest.param((1, 8, 1), marks=pytest.mark.slow),
        pytest.param((1, 1, 8), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_going_on_over_another_mesh_agrees(straight, stopped, tmp_path, mesh):
    """data x fsdp x expert."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    data, fsdp, expert = mesh
    sizes = {"mesh.data": data, "mesh.fsdp": fsdp, "mesh.expert": expert}
    train(workdir, fast=True, train__stop_at=8, **sizes)
    _assert_agrees(workdir, straight.workdir)


@pytest.mark.slow
def test_going_on_with_one_device_agrees(straight, stopped, tmp_path, compile_cache):
    """A process of its own: it is the number of devices that changes."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    argv = flags(train__stop_at=8, mesh__fsdp=1, mesh__expert=1, compile_cache=compile_cache)
    process = command(workdir, 1, argv)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert "for one device" in out
    _assert_agrees(workdir, straight.workdir)


@pytest.mark.slow
def test_lengths_batch_and_schedule_may_change(stopped, tmp_path):
    """Branched into the decay of wsd, with more and shorter rows: goes on in the same text."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    train(
        workdir, fast=True, data__seq_len=32, data__batch_size=16, eval__batch_size=16,
        train__accumulation=2, train__num_steps=10,
        optim__schedule="wsd", optim__decay_start=6, optim__min_ratio=0.1,
    )  # fmt: skip
    lines = rows(workdir)
    assert [row["step"] for row in lines] == list(range(1, 11))
    assert [row["lr"] for row in lines[6:]] == pytest.approx([0.02, 0.0155, 0.011, 0.0065])
    assert lines[-1]["tokens"] == 10 * STEP_TOKENS
    assert max(row["loss"] for row in lines[6:]) < lines[0]["loss"] - 0.3
    before, after = position(stopped.workdir, 6)["data"], position(workdir, 10)["data"]
    assert (before["rows"], after["seq_len"]) == (6 * 8, 32)
    begun = before["rows"] * after["rows_per_epoch"] // before["rows_per_epoch"]
    assert after["rows"] == begun + 4 * 16
    assert abs(begun / after["rows_per_epoch"] - 48 / before["rows_per_epoch"]) < 1e-3


def test_weights_alone_start_a_new_run(straight, tmp_path):
    """Weights and router bias to the bit; step, optimizer and data from the beginning."""
    source, workdir = straight.workdir / "checkpoints" / "20", tmp_path / "work"
    done = train(workdir, init_from=str(source), train__stop_at=1)
    assert f"starting from the weights of {source}" in done.out and steps_on_disk(workdir) == [1]
    (line,) = rows(workdir)
    assert (line["step"], line["tokens"]) == (1, STEP_TOKENS)
    assert line["loss"] < losses(straight.workdir)[0] - 1.0
    assert position(workdir, 1)["data"]["rows"] == SMALL["data.batch_size"]

    cfg = load_config("base", SMALL | {"init_from": str(source)})
    program = build_program(cfg, make_mesh(cfg.mesh))
    state, start, _ = restore_or_init(program, Checkpoints(tmp_path / "none"), lambda line: None)
    begun = jax.device_get(as_tree(state, cfg.seed))
    for item in ("params", "balance"):
        on_disk = {"params": "params/", "balance": "rest/balance/"}[item]
        wanted = {
            f"{item}/{name.removeprefix(on_disk)}": value
            for name, value in saved(straight.workdir, 20).items()
            if name.startswith(on_disk)
        }
        assert wanted
        assert_same_bits(_named(begun, item), wanted)
    assert start == {} and begun["step"] == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(begun["opt_state"]))


def _named(tree: dict, item: str) -> dict[str, np.ndarray]:
    return {f"{item}/{name}": np.asarray(a) for name, a in named_leaves(tree[item]).items()}
