"""The model these tests train: each kind of layer once, on the texts of the fixtures; and how."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import moejax
from moejax.checkpoint import reader
from moejax.train import loop
from moejax.train.compile import Compiled, compile_once
from moejax.train.loop import Loop
from tests.environment import clean_environment

RUN = importlib.import_module("moejax.train.run")  # the package's `run` is the function in it
ROOT = Path(__file__).parents[2]
TEXT = ROOT / "tests" / "fixtures" / "text"
PATIENCE_S = 900.0  # for a process on a machine that others use too
STEPS, STEP_TOKENS = 20, 8 * 64

# Whole, so that no tuning of a shipped config moves the golden curve. The constant schedule makes
# one program of runs of any length. With larger weights than usual attention is not flat: on a
# flat one the indexer's loss, and so its gradient, is little more than rounding.
SMALL: dict[str, Any] = {
    "seed": 0,
    "model.num_layers": 2, "model.attention": "kda,dsa", "model.last_attention": "",
    "model.attn_res_block": 1, "model.dim": 32, "model.vocab_size": 257, "model.init_std": 0.1,
    "model.ffn.num_dense_layers": 0,
    "model.kda.num_heads": 2, "model.kda.head_dim": 16, "model.kda.value_head_dim": 16,
    "model.kda.decay_rank": 8, "model.kda.chunk": 16,
    "model.mla.num_heads": 2, "model.mla.q_latent": 16, "model.mla.kv_latent": 16,
    "model.mla.nope_dim": 16, "model.mla.rope_dim": 8, "model.mla.value_dim": 16,
    "model.dsa.num_heads": 2, "model.dsa.head_dim": 8, "model.dsa.top_k": 8,
    "model.moe.num_experts": 8, "model.moe.top_k": 2, "model.moe.expert_dim": 16,
    "model.moe.latent_dim": 16, "model.moe.num_shared": 1, "model.moe.balance": "quantile",
    "mesh.data": 1, "mesh.fsdp": 2, "mesh.expert": 4,
    "data.source": "files", "data.paths": tuple(f"{TEXT}/*.{end}" for end in ("txt", "md")),
    "data.validation_percent": 10.0, "data.tokenizer": "byte",
    "data.seq_len": 64, "data.batch_size": 8,
    "optim.name": "muon", "optim.lr": 0.02, "optim.adam_lr": 0.004, "optim.weight_decay": 0.1,
    "optim.schedule": "constant", "optim.warmup_fraction": 0.0, "optim.clip_norm": 1.0,
    "train.num_steps": STEPS, "train.accumulation": 1, "train.self_check": "off",
    "eval.every": 8, "eval.batches": 2, "eval.batch_size": 8,
    "checkpoint.every": 2, "checkpoint.keep": 2, "checkpoint.keep_every": 8,
    "log.progress": False,
}  # fmt: skip


class Done(NamedTuple):
    """A run of this process: its result, what it printed, and its loop (None if none began)."""

    result: moejax.TrainResult
    out: str
    loop: Loop | None


def train(
    workdir: Path, config: str = "base", settings: dict = SMALL, fast: bool = False, **changes: Any
) -> Done:
    """`moejax.train` with SMALL and changes, `__` for the dot; the loop is kept to look at.

    With `fast` the step is compiled in a third of the time, not to the same bits.
    """
    loops: list[Loop] = []

    class Kept(Loop):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            loops.append(self)

    overrides = settings | {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(RUN, "Loop", Kept)
        if fast:
            patch.setattr(loop, "compile_once", _compile_fast)
        result = moejax.train(config, workdir, overrides)
    return Done(result, out.getvalue(), loops[0] if loops else None)


def _compile_fast(*args: Any, **options: Any) -> Compiled:
    quick = {"xla_backend_optimization_level": 0}
    return compile_once(*args, **options | {"compiler_options": quick})


def flags(**changes: Any) -> list[str]:
    """SMALL with changes as arguments of the command line."""
    fields = SMALL | {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config=base", *(f"--config.{name}={value}" for name, value in fields.items())]


def command(workdir: Path, devices: int, argv: list[str]) -> subprocess.Popen:
    """`moejax train` as a process, away from the settings of this test run."""
    clean = clean_environment()
    return subprocess.Popen(
        [sys.executable, "-m", "moejax.cli.main", "train", f"--workdir={workdir}",
         f"--devices={devices}", *argv],
        cwd=ROOT, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def rows(workdir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl, as it stands."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir: Path, first: int = 1, last: int = STEPS) -> list[float]:
    """Training losses of steps `first` to `last`."""
    return [row["loss"] for row in rows(workdir) if first <= row["step"] <= last]


def steps_on_disk(workdir: Path) -> list[int]:
    """Finished checkpoints."""
    return sorted(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())


def saved(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by name: weights, optimizer, balancing, step, random key."""
    where = workdir / "checkpoints" / str(step)
    items: dict[str, dict[str, Any]] = {"params": {}, "rest": {}}
    for name, (shape, dtype) in reader.read_meta(where)["leaves"].items():
        item, rest = ("params", name.removeprefix("params/")), ("rest", name)
        kind, key = item if name.startswith("params/") else rest
        items[kind][key] = jax.ShapeDtypeStruct(tuple(shape), dtype)
    arrays = reader.read_arrays(where, items)
    return {f"{kind}/{k}": np.asarray(a) for kind in arrays for k, a in arrays[kind].items()}


def position(workdir: Path, step: int) -> dict[str, Any]:
    """Where the data stood, and the tokens seen."""
    return reader.read_meta(workdir / "checkpoints" / str(step))["position"]


def copied(workdir: Path, to: Path) -> Path:
    """A run's folder once more, to go on from in another way."""
    shutil.copytree(workdir, to)
    return to


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    """Equal names, dtypes and bytes."""
    assert a.keys() == b.keys()
    differing = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    assert not differing and all(a[name].dtype == b[name].dtype for name in a)
