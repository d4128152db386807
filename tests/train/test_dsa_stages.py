"""What a training step of each DSA stage changes, bit for bit."""

import jax
import numpy as np
import pytest

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from moejax.train.step import train_step
from tests.cli.conftest import SMALL

DSA = SMALL | {
    "model.num_layers": 2, "model.attention": "dsa", "model.dsa.top_k": 5, "mesh.fsdp": 1,
    "optim.name": "muon", "optim.weight_decay": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    "stage", ["warmup", *(pytest.param(s, marks=pytest.mark.slow) for s in ("sparse", "frozen"))]
)
def test_a_step_moves_what_its_stage_trains(stage):
    """Stage 1 the indexer alone, weight decay and experts' balance included; frozen all but it."""
    cfg = load_config("tiny", {k: str(v) for k, v in (DSA | {"model.dsa.stage": stage}).items()})
    program = build_program(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "segment_ids": np.ones_like(tokens)}
    batch = put_batch(program, batch, 1)
    before = init_state(program, 0)
    with jax.set_mesh(program.mesh):
        step = jax.jit(lambda s, b: train_step(program, s, b),
                       compiler_options={"xla_backend_optimization_level": 0})  # fmt: skip
        after, metrics = step(before, batch)
    assert bool(metrics["finite"])
    names = [info.name for info in jax.tree.leaves(program.parts.infos)]
    pairs = zip(*(jax.tree.leaves(jax.device_get(s.params)) for s in (before, after)), strict=True)
    moved = {name for name, (a, b) in zip(names, pairs, strict=True) if np.any(a != b)}
    indexer = {name for name in names if ".indexer." in name}
    assert indexer and len(names) > len(indexer)
    if stage == "warmup":
        assert moved == indexer
    else:
        assert bool(moved & indexer) == (stage == "sparse")
        assert {name for name in names if name.endswith(("attn.o", "head.weight"))} <= moved
        assert len(moved - indexer) > 0.9 * (len(names) - len(indexer))
    balance = zip(
        *(jax.tree.leaves(jax.device_get(s.balance)) for s in (before, after)), strict=True
    )
    assert any(np.any(a != b) for a, b in balance) == (stage != "warmup")
