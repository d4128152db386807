"""What a run leaves to look at: metrics, TensorBoard, checkpoints, a trace, its summary."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import jax
import pytest
from tensorboardX.proto.event_pb2 import Event

from moejax.checkpoint import Checkpoints
from moejax.cli.main import main
from moejax.train.report import program_name
from tests.e2e.small import STEP_TOKENS, STEPS, copied, flags, rows, steps_on_disk, train

# 11,328 bytes of validation text in 4 documents: a byte a token, and an end of each.
BYTES_PER_TOKEN = 11328 / 11332


def test_every_step_has_one_line_with_every_field(straight):
    lines = rows(straight.workdir)
    assert [row["step"] for row in lines] == list(range(1, STEPS + 1))
    for row in lines:
        assert 1.0 < row["loss"] < 6.0 and 0.0 < row["grad_norm"] < 100.0
        assert row["lr"] == pytest.approx(0.02)
        assert row["tokens"] == row["step"] * STEP_TOKENS
        assert row["tokens_per_s"] * row["step_s"] == pytest.approx(STEP_TOKENS)
        assert 0.0 < row["mfu"] < 1.0 and row["peak_memory_bytes"] > 100_000
        assert row["model_flops_per_token"] == lines[0]["model_flops_per_token"] > 1e5


def test_layers_with_experts_have_a_value_each(straight):
    """Loads are relative to the mean of the layer's experts: 1 is even, 0 an idle expert."""
    for row in rows(straight.workdir):
        for name in ("moe_load_max", "moe_load_min", "moe_dropped", "moe_rounds", "dead_experts"):
            assert len(row[name]) == 2, name
        assert all(1.0 <= load <= 8.0 for load in row["moe_load_max"])
        assert all(0.0 <= load <= 1.0 for load in row["moe_load_min"])
        assert row["moe_dropped"] == row["dead_experts"] == [0, 0]
        assert all(rounds >= 1 for rounds in row["moe_rounds"])
        assert len(row["moe_sent_bytes"]) == 2 and min(row["moe_sent_bytes"]) > 0
        assert row["moe_sent_bytes_network"] == [0, 0]  # one host
        assert len(row["indexer_kl"]) == 1 and row["indexer_kl"][0] >= 0.0


def test_evaluation_comes_at_its_period_and_at_the_end(straight):
    lines = rows(straight.workdir)
    evaluated = {row["step"]: row for row in lines if row["eval_loss"] is not None}
    assert list(evaluated) == [8, 16, STEPS]
    for row in evaluated.values():
        assert row["eval_nats_per_byte"] == pytest.approx(row["eval_loss"] / BYTES_PER_TOKEN)
    assert evaluated[STEPS]["eval_loss"] < evaluated[8]["eval_loss"]
    assert straight.done.result.metrics["eval_loss"] == evaluated[STEPS]["eval_loss"]
    assert all(row["eval_nats_per_byte"] is None for row in lines if row["step"] not in evaluated)


def test_checkpoints_kept_are_the_newest_the_multiples_and_the_best(straight):
    assert steps_on_disk(straight.workdir) == [8, 16, 18, 20]
    checkpoints = Checkpoints(straight.workdir)
    losses = {row["step"]: row["eval_loss"] for row in rows(straight.workdir) if row["eval_loss"]}
    assert checkpoints.best_step() == min(losses, key=losses.__getitem__)
    assert straight.done.result.checkpoint == straight.workdir / "checkpoints" / "20"


def _scalars(folder: Path, tag: str) -> dict[int, float]:
    """Step -> value out of TensorBoard's files: records of length, checksum, event, checksum."""
    found = {}
    for path in folder.glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                if value.tag == tag:
                    found[event.step] = value.simple_value
            data = data[16 + length :]
    return found


def test_tensorboard_holds_the_same_numbers(straight):
    lines, folder = rows(straight.workdir), straight.workdir / "tensorboard"
    assert _scalars(folder, "loss") == pytest.approx({row["step"]: row["loss"] for row in lines})
    second_layer = {row["step"]: row["moe_load_max"][1] for row in lines}
    assert _scalars(folder, "moe_load_max/1") == pytest.approx(second_layer)


def test_the_step_compiles_once_and_the_summary_says_from_where(straight, stopped):
    for run, cache in ((straight, "cold"), (stopped, "warm")):
        loop = run.done.loop
        assert loop is not None and loop.compiled is not None
        assert loop.compiled.traces == [1] and loop.compiled.cache == cache
        assert f"to the first step, compilation cache {cache}" in run.done.out
    assert straight.done.loop.compiled.compile_s > stopped.done.loop.compiled.compile_s


def test_the_summary_ends_with_commands_to_try(straight):
    out = straight.done.out
    assert f"{straight.workdir}: finished" in out and f"{STEPS}/{STEPS}" in out
    moejax = program_name()
    assert f"  {moejax} eval --workdir={straight.workdir} --devices=8\n" in out
    again, shown = (line.split(" --config.", 1) for line in out.splitlines()[-2:])
    assert again[0] == f"  {moejax} train --config=base --workdir={straight.workdir} --devices=8"
    assert shown[0] == f"  {moejax} config --config=base --devices=8"
    assert "train.num_steps=40" in again[1] and "train.num_steps=20" in shown[1]
    assert "--config.data.tokenizer=byte" in again[1] and "data.tokenizer=byte" in shown[1]


def test_the_steps_asked_for_are_traced(stopped):
    (trace,) = (stopped.workdir / "profile").rglob("*.xplane.pb")
    assert trace.stat().st_size > 10_000
    assert f"profile: {stopped.workdir / 'profile'}" in stopped.done.out


def test_a_finished_run_says_so_and_does_nothing(straight, capfd):
    before = {p: p.stat().st_mtime_ns for p in straight.workdir.rglob("*")}
    assert main(["train", f"--workdir={straight.workdir}", *flags()]) == 0
    assert f"{straight.workdir} is finished: step 20" in capfd.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in straight.workdir.rglob("*")} == before


def test_only_the_time_of_steps_counts_as_theirs(stopped, monkeypatch, tmp_path):
    """A trace that takes long to begin and to end makes no step, and no mean, slower."""
    workdir = copied(stopped.workdir, tmp_path / "work")
    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, lambda *_: time.sleep(5.0))
    done = train(workdir, profile__steps="8-9", train__stop_at=12, eval__every=0)
    assert "profile: " in done.out
    assert max(row["step_s"] for row in rows(workdir)[6:]) < 5.0
    assert done.loop.mean_tokens_per_s() > STEP_TOKENS / 5.0
