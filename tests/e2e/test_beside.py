"""What a run does beside its steps: further evaluation sets, and samples from fixed prompts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from moejax.config import ConfigError, MeshConfig
from moejax.generate import load
from moejax.generate.prompts import prompt_ids
from moejax.observability import MetricsLog
from moejax.partitioning import make_mesh
from tests.e2e.conftest import PROMPTS
from tests.e2e.small import STEPS, rows, train

EVALUATED = [8, 16, STEPS]


def samples(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "samples.jsonl").read_text().splitlines()]


def test_every_set_is_evaluated_with_the_validation_split(straight):
    """A set of the validation split's documents has its loss; the one program serves all."""
    names = [
        f"eval/{name}/{key}" for name in ("stocks", "held_out") for key in ("loss", "nats_per_byte")
    ]
    for row in rows(straight.workdir):
        assert all((row[name] is not None) == (row["step"] in EVALUATED) for name in names)
        assert row["eval/held_out/loss"] == row["eval_loss"]
        assert row["eval/held_out/nats_per_byte"] == row["eval_nats_per_byte"]
    last = rows(straight.workdir)[-1]
    assert math.isfinite(last["eval/stocks/loss"]) and last["eval/stocks/loss"] != last["eval_loss"]
    loop = straight.done.loop
    assert loop.evaluator.compiled.traces == [1]
    assert all(e.compiled is loop.evaluator.compiled for e in loop.sets.values())
    assert f"stocks {last['eval/stocks/loss']:.4f}, " in " ".join(straight.done.out.split())
    assert straight.done.result.metrics["eval/stocks/loss"] == last["eval/stocks/loss"]


def test_samples_come_at_their_period_and_at_the_end(straight):
    lines = samples(straight.workdir)
    assert [(line["step"], line["prompt"]) for line in lines] == [
        (step, prompt) for step in EVALUATED for prompt in PROMPTS
    ]
    model = load(straight.workdir, mesh=make_mesh(MeshConfig(), jax.devices()[:1]))
    model.compiler_options = {"xla_backend_optimization_level": 0}
    ids = [prompt_ids(model.tokenizer, prompt) for prompt in PROMPTS]
    want = [model.tokenizer.decode(np.array(row, np.int32)) for row in _greedy(model, ids)]
    assert [line["text"] for line in lines[-2:]] == want


def _greedy(model, prompts):
    """The most likely tokens by the plain forward pass, without caches."""
    out = []
    for ids in prompts:
        row = list(ids)
        while len(row) < len(ids) + 5 and (len(row) == len(ids) or row[-1] != 256):
            padded = [[0] * (16 - len(row)) + row]
            logits = model.logits(padded, [[0] * (16 - len(row)) + [1] * len(row)])
            row.append(int(logits[0, -1].argmax()))
        out.append([token for token in row[len(ids) :] if token != 256])
    return out


def test_samples_compile_once_and_are_charged_to_no_step(straight, stopped):
    generator = straight.done.loop.samples.generator
    assert dict(generator.compilations) == {"prefill": 1, "step": 1}
    assert straight.done.loop.compiled.traces == [1] and stopped.done.loop.samples is None
    first, *later = straight.sampled_s
    assert len(later) == 2 and max(later) < first
    after = {row["step"]: row["step_s"] for row in rows(straight.workdir)}
    assert after[9] < first / 2, "the step behind it holds nothing of its time"


def test_tensorboard_shows_the_texts(straight):
    found = {}
    for path in (straight.workdir / "tensorboard").glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            for value in event.summary.value:
                if value.tag.startswith("samples/"):
                    found[event.step, value.tag.split("/")[1]] = value.tensor.string_val[0].decode()
            data = data[16 + length :]
    lines = samples(straight.workdir)
    assert len(found) == len(lines)
    for place, line in enumerate(lines):
        shown = found[line["step"], str(place % 2)]
        text = line["prompt"] + line["text"]
        assert shown == "".join(f"    {part}\n" for part in text.split("\n"))


def test_a_resumed_run_takes_back_the_samples_it_makes_again(tmp_path):
    for first_step, steps in ((None, (8, 16)), (9, (16, 20))):
        log = MetricsLog(tmp_path, first_step=first_step, file="samples.jsonl")
        for step in steps:
            log.write(step, {"prompt": "a", "text": f"{first_step}"})
        log.close()
    assert [(line["step"], line["text"]) for line in samples(tmp_path)] == [
        (8, "None"), (16, "9"), (20, "9")
    ]  # fmt: skip


def test_a_set_that_cannot_be_read_leaves_nothing(tmp_path):
    with pytest.raises(ConfigError, match="evaluation set web: .*names no file"):
        train(tmp_path / "work", eval__sets=({"name": "web", "paths": ("/nowhere/*.txt",)},))
    assert not list(tmp_path.iterdir())
