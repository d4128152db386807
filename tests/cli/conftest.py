"""A one-layer model that trains in seconds, and the command called as a shell would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from moejax.cli.main import main

TEXT = Path(__file__).parents[1] / "fixtures" / "text"

SMALL = {
    "model.num_layers": 1, "model.attention": "mla", "model.last_attention": "",
    "model.attn_res_block": 0, "model.dim": 32, "model.ffn.dim": 32, "model.vocab_size": 257,
    "data.source": "files", "data.paths": (f"{TEXT}/*.txt",), "data.validation_percent": 10.0,
    "data.tokenizer": "byte", "data.seq_len": 32, "data.batch_size": 8,
    "mesh.fsdp": -1, "mesh.expert": 1, "optim.name": "adamw",
    "train.num_steps": 2, "eval.batches": 2, "eval.batch_size": 0,
    "log.tensorboard": False, "log.progress": False, "compile_cache": "off",
}  # fmt: skip


class Outcome(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def flags(**changes: object) -> list[str]:
    """`--config.FIELD=VALUE` of SMALL with changes; `__` stands for the dot."""
    fields = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--config.{name}={value}" for name, value in fields.items()]


@pytest.fixture
def moejax(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs the command in this process."""

    def call(*argv: str) -> Outcome:
        capfd.readouterr()
        code = main([*map(str, argv)])
        return Outcome(code, *capfd.readouterr())

    return call


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The workdir of a run of two steps, for tests that only read it."""
    workdir = tmp_path_factory.mktemp("run") / "work"
    assert main(["train", "--config=tiny", f"--workdir={workdir}", *flags()]) == 0
    return workdir
