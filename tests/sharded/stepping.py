"""Real training steps on any mesh, with the gradients that the update used."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import (
    DsaConfig,
    FfnConfig,
    KdaConfig,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
)
from moejax.data.packing import next_token_labels
from moejax.train import step
from moejax.train.state import Program, TrainState, build_program
from tests.models.running import lively
from tests.sharded.meshes import mesh_of

# These programs run two or three times, so compiling fast counts more than running fast.
FAST_COMPILE = {"xla_backend_optimization_level": 0}
B, T, VOCAB = 32, 41, 64  # a T that no other size is a multiple of
UPDATES = 2

# A dense KDA layer, two scanned KDA layers with experts, a DSA layer with experts; two blocks of
# Attention Residuals; no chunk or block of any kind divides the row. `norm_eps` bounds by how much
# the norm of a KDA output near 0 (the first token of a document) magnifies rounding.
MODEL = ModelConfig(
    vocab_size=VOCAB, dim=32, num_layers=4, attention="kda,kda,kda,dsa", last_attention="",
    attn_res_block=2, norm_eps=1e-2,
    kda=KdaConfig(num_heads=2, head_dim=8, value_head_dim=8, decay_rank=8, chunk=16),
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=8),
    dsa=DsaConfig(num_heads=2, head_dim=8, top_k=6),
    ffn=FfnConfig(dim=48),
    # A buffer below an even share, so that every layer takes more than one round.
    moe=MoeConfig(num_experts=8, top_k=2, expert_dim=16, latent_dim=16, buffer_factor=0.5),
)  # fmt: skip


class Steps(NamedTuple):
    """What `UPDATES` steps on one mesh gave, as NumPy arrays; lists hold one entry a step."""

    metrics: list[dict]
    grads: list[dict]
    balance: list[dict]
    params: dict
    hlo: str
    program: Program
    placed: tuple  # shardings (state, gradients) that the compiled step chose


def rows() -> dict[str, np.ndarray]:
    """[B, T] rows of three documents whose borders differ from row to row, and padding."""
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, (B, T), dtype=np.int32)
    borders = np.sort(rng.integers(3, T - 3, (B, 3)), axis=1)
    segment_ids = 1 + (np.arange(T) >= borders[:, :, None]).sum(1).astype(np.int32)
    segment_ids = np.where(segment_ids > 3, 0, segment_ids)
    labels = np.stack([next_token_labels(*row) for row in zip(tokens, segment_ids, strict=True)])
    return {"tokens": tokens, "segment_ids": segment_ids, "labels": labels}


def put_batch(program: Program, accumulation: int) -> dict[str, jax.Array]:
    """The rows as microbatches, where a batch lives."""
    where = step.batch_sharding(program)
    return {
        name: jax.device_put(a.reshape(accumulation, -1, T), where) for name, a in rows().items()
    }


def config(sizes: dict[str, int], model: ModelConfig = MODEL, **train) -> RunConfig:
    """A run whose every update has a full learning rate."""
    return RunConfig(
        mesh=MeshConfig(**sizes),
        model=model,
        optim=OptimConfig(warmup_fraction=0.0, schedule="constant"),
        train=TrainConfig(num_steps=10, **train),
    )


@functools.cache
def start() -> TrainState:
    """The state before the first step, whole, with weights under which every path matters.

    They are also such that float32 can resolve the gradient: decays near 1 as in training, and maps
    that do not enlarge. With the largest ones one device alone is 1e-3 away from its float64 self.
    """
    _, params, balance = lively(MODEL, seed=1)
    params = jax.tree_util.tree_map_with_path(calmer, params)
    program = build_program(config({"fsdp": 1}), mesh_of({"fsdp": 1}))
    return TrainState(params, program.optimizer.init(params), balance, np.int32(0))


def calmer(path, leaf: np.ndarray) -> np.ndarray:
    """A leaf of lively weights in a size at which float32 resolves the gradient, see `start`."""
    name = path[-1].key
    if name.endswith("_conv"):
        return np.float32(0.3) * (1 + leaf)
    if name == "dt_bias":
        return leaf - np.float32(3)
    return np.float32(0.3) * leaf if leaf.ndim > 3 else leaf  # maps, which are stacked by layer


def step_with_grads(program: Program, state: TrainState, batch: dict, given: tuple | None = None):
    """`train_step` itself, and the gradients that passed through it (`given`, or computed)."""
    seen: list = []
    gradients = step.gradients

    def spy(*args):
        seen.append(given or gradients(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "gradients", spy)
        new, metrics = step.train_step(program, state, batch)
    ((grads, _),) = seen
    return new, metrics, grads


@functools.cache
def steps(
    mesh_items: tuple, accumulation: int = 1, remat: str = "none", exchange: tuple = ()
) -> Steps:
    """Two updates on a mesh by the whole step as one program.

    Args:
      exchange: settings of `model.moe` that change how tokens travel, as pairs.
    """
    program = _program(mesh_items, accumulation, remat, exchange)
    jitted = jax.jit(
        lambda state, batch: step_with_grads(program, state, batch),
        out_shardings=(program.shardings, None, None),
        compiler_options=FAST_COMPILE,
    )
    with jax.set_mesh(program.mesh):
        arguments = jax.device_put(start(), program.shardings), put_batch(program, accumulation)
        compiled = jitted.lower(*arguments).compile()
    return _run(program, accumulation, compiled, compiled.as_text())


def steps_in_two(mesh_items: tuple, accumulation: int, remat: str) -> Steps:
    """Two updates by the step cut behind its gradients, so that a mesh compiles the update once."""
    program = _program(mesh_items, accumulation, remat)
    gradients = jax.jit(
        lambda state, batch: step.gradients(program, state, batch),
        out_shardings=(program.shardings.params, NamedSharding(program.mesh, P())),
        compiler_options=FAST_COMPILE,
    )
    update = _update(mesh_items)
    return _run(program, accumulation, lambda *args: update(args[0], gradients(*args)))


@functools.cache
def _update(mesh_items: tuple):
    """(state, (gradients, measured)) -> what `step_with_grads` gives; counts of the batch."""
    program = _program(mesh_items, 1, "none")
    batch = put_batch(program, 1)
    return jax.jit(
        lambda state, given: step_with_grads(program, state, batch, given),
        out_shardings=(program.shardings, None, None),
        compiler_options=FAST_COMPILE,
    )


def _program(mesh_items: tuple, accumulation: int, remat: str, exchange: tuple = ()) -> Program:
    sizes = dict(mesh_items)
    model = MODEL.replace(moe=MODEL.moe.replace(**dict(exchange)))
    cfg = config(sizes, model, accumulation=accumulation, remat=remat)
    return build_program(cfg, mesh_of(sizes))


def _run(program: Program, accumulation: int, call, hlo: str = "") -> Steps:
    state = jax.device_put(start(), program.shardings)
    batch = put_batch(program, accumulation)
    metrics, grads, balance = [], [], []
    with jax.set_mesh(program.mesh):
        for _ in range(UPDATES):
            state, measured, grad = call(state, batch)
            metrics.append(jax.tree.map(np.asarray, measured))
            grads.append(jax.tree.map(np.asarray, grad))
            balance.append(jax.tree.map(np.asarray, state.balance))
    placed = jax.tree.map(lambda a: a.sharding, (state, grad))
    params = jax.tree.map(np.asarray, state.params)
    return Steps(metrics, grads, balance, params, hlo, program, placed)
