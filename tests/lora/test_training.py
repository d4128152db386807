"""LoRA training: adapters alone learn, all of them, the same on every mesh."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from moejax.config import LoraConfig, MeshConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from moejax.data.packing import next_token_labels
from moejax.train.evaluate import put_batch
from moejax.train.state import Program, TrainState, build_program, frozen_leaves
from moejax.train.step import gradients, train_step
from moejax.train.trainable import split
from tests.lora.adapting import EVERYWHERE, EXPERTS, lively_adapters
from tests.models.running import FAST_COMPILE
from tests.models.small_configs import small
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    assert_leaves_agree,
    mesh_of,
    named,
    relative_error,
)
from tests.sharded.stepping import calmer

B, T = 8, 19
# A buffer below an even share, so that tokens travel in several rounds.
MODEL = small(
    "kda,dsa", 3, norm_eps=1e-2, moe={"buffer_factor": 0.5, "receive_factor": 0.75, "top_k": 2}
)
ALL = {"target_regex": EVERYWHERE, "target_parameters": EXPERTS, "rank": 3, "alpha": 2.0}


def program_on(sizes: dict, *, model: ModelConfig = MODEL, lora: dict | None = None, **train):
    """A run whose every update has a full learning rate."""
    cfg = RunConfig(
        mesh=MeshConfig(**sizes), model=model, lora=LoraConfig(**(ALL if lora is None else lora)),
        optim=OptimConfig(
            name="adamw", warmup_fraction=0.0, schedule="constant", weight_decay=0.0, adam_eps=1e-3,
        ),
        train=TrainConfig(num_steps=10, **train),
    )  # fmt: skip
    return build_program(cfg, mesh_of(sizes))


def batch_of(program: Program, accumulation: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, 50, (B, T), dtype=np.int32)
    borders = rng.integers(3, T - 3, (B, 1))
    segment_ids = 1 + (np.arange(T) >= borders).astype(np.int32)
    labels = np.stack([next_token_labels(*row) for row in zip(tokens, segment_ids, strict=True)])
    rows = {"tokens": tokens, "labels": labels, "segment_ids": segment_ids}
    return put_batch(program, rows, accumulation)


class Updates(NamedTuple):
    """Two updates: gradients of the first, and the states and metrics in turn."""

    grads: dict
    states: list[TrainState]
    metrics: list[dict]


def updates(program: Program, state: TrainState, accumulation: int = 1) -> Updates:
    batch = batch_of(program, accumulation)

    def step(state, batch):
        return gradients(program, state, batch)[0], *train_step(program, state, batch)

    jitted = jax.jit(
        step, out_shardings=(None, program.shardings, None), compiler_options=FAST_COMPILE
    )
    states, metrics, grads = [], [], []
    with jax.set_mesh(program.mesh), jax.default_matmul_precision("highest"):
        state = jax.device_put(state, program.shardings)
        for _ in range(2):
            grad, state, measured = jitted(state, batch)
            grads.append(jax.device_get(grad))
            states.append(jax.device_get(state))
            metrics.append(jax.device_get(measured))
    return Updates(grads[0], states, metrics)


def begun(program: Program, params: dict, balance: dict) -> TrainState:
    trained = split(params, program.trains)[0]
    return TrainState(params, program.optimizer.init(trained), balance, np.int32(0))


@functools.cache
def lively_start(**lora) -> tuple[dict, dict]:
    params, balance = lively_adapters(program_on(ONE, lora=ALL | lora).parts)
    return jax.tree_util.tree_map_with_path(calmer, params), balance


@functools.cache
def on_one_device() -> Updates:
    program = program_on(ONE)
    return updates(program, begun(program, *lively_start()))


def assert_same(got: Updates, want: Updates) -> None:
    assert_leaves_agree(got.grads, want.grads, 1e-5)
    for one, other in zip(got.metrics, want.metrics, strict=True):
        for name in ("loss", "grad_norm"):
            assert relative_error(one[name], other[name]) <= 1e-5, name
        np.testing.assert_array_equal(one["load"], other["load"])
    assert_leaves_agree(got.states[-1].params, want.states[-1].params, 1e-5)


RAGGED = {"exchange": "ragged", "exchange_slices": 2}
CASES = [
    (FSDP2_EXPERT4, 1, "full", RAGGED, {}),
]
SLOW = [
    (FSDP2_EXPERT4, 1, "full", RAGGED, {"shared_a": True}),
    (DATA2_FSDP2_EXPERT2, 1, "exchange", {}, {}),
    (EXPERT8, 1, "none", {}, {}),
    (FSDP8, 1, "full", {}, {}),
    (ONE, 4, "none", {}, {}),
    (EXPERT8, 1, "exchange", RAGGED | {"exchange_level": "device"}, {"shared_a": True}),
    (DATA2_FSDP2_EXPERT2, 1, "full", RAGGED, {}),
]


def check(sizes, accumulation, remat, exchange, lora) -> None:
    model = MODEL.replace(moe=MODEL.moe.replace(**exchange))
    program = program_on(
        sizes, model=model, lora=ALL | lora, remat=remat, accumulation=accumulation
    )
    want = on_one_device()
    if lora:
        plain = program_on(ONE, lora=ALL | lora)
        want = updates(plain, begun(plain, *lively_start(**lora)))
    assert_same(updates(program, begun(program, *lively_start(**lora)), accumulation), want)


def name_of(case) -> str:
    sizes, accumulation, remat, exchange, lora = case
    return "-".join(map(str, (named(sizes), accumulation, remat, *exchange.values(), *lora)))


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_equals_one_device(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name_of)
def test_equals_one_device_too(case):
    check(*case)


@functools.cache
def from_fresh() -> tuple[Program, TrainState, Updates]:
    """Two updates of fresh adapters over a lively base."""
    program = program_on(ONE)
    params, balance = lively_start()
    fresh = jax.jit(program.parts.init, compiler_options=FAST_COMPILE)(jax.random.key(0))[0]

    def chosen(info, own, new):
        return np.asarray(new) if ".lora." in info.name else own

    params = jax.tree.map(chosen, program.parts.infos, params, jax.device_get(fresh))
    state = begun(program, params, balance)
    return program, state, updates(program, state)


def test_every_b_learns_at_the_first_step_and_every_a_at_the_second():
    program, before, got = from_fresh()
    states = [before, *got.states]
    infos = split(program.parts.infos, program.trains)[0]
    trained = [jax.tree.leaves(split(s.params, program.trains)[0]) for s in states]
    for info, zero, one, two in zip(jax.tree.leaves(infos), *trained, strict=True):
        assert info.name.endswith((".a", ".b"))
        moved = [np.any(a != b, axis=tuple(range(2, a.ndim))) for a, b in ((zero, one), (one, two))]
        assert moved[1].all(), info.name  # in every layer of the stack
        assert moved[0].all() == info.name.endswith(".b"), info.name


def test_the_base_keeps_its_bits_and_its_balance():
    program, before, got = from_fresh()
    old, new = (frozen_leaves(program, s.params) for s in (before, got.states[-1]))
    assert old.keys() == new.keys() and old
    for name in old:
        assert old[name].tobytes() == new[name].tobytes(), name
    for one, other in zip(
        jax.tree.leaves(before.balance), jax.tree.leaves(got.states[-1].balance), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_only_adapters_have_optimizer_state():
    program = program_on(ONE)
    trained = split(program.abstract.params, program.trains)[0]
    size = sum(np.prod(x.shape) for x in jax.tree.leaves(trained))
    state = sum(np.prod(x.shape) for x in jax.tree.leaves(program.abstract.opt_state))
    assert 2 * size <= state <= 2 * size + 64
    assert all(
        ".lora." in i.name for i in jax.tree.leaves(split(program.parts.infos, program.trains)[0])
    )


def test_a_step_has_no_room_for_gradients_of_the_base():
    """Temporaries of the compiled step, where one map's gradient would be most of the model."""
    wide = small("kda,mla", 2, vocab_size=50, dim=256, moe={"expert_dim": 256, "latent_dim": 256})
    lora = {"rank": 2, "targets": ("q_proj", "gate"), "target_parameters": EXPERTS}
    program = program_on(ONE, model=wide, lora=lora)
    full = program_on(ONE, model=wide, lora={"rank": 0})
    bytes_of = {}
    for name, one in (("lora", program), ("full", full)):
        batch = batch_of(one, 1)
        with jax.set_mesh(one.mesh):
            jitted = jax.jit(
                lambda state, batch, one=one: train_step(one, state, batch),
                donate_argnums=0, compiler_options=FAST_COMPILE,
            )  # fmt: skip
            bytes_of[name] = jitted.lower(one.abstract, batch).compile().memory_analysis()
    base = sum(4 * np.prod(x.shape) for x in jax.tree.leaves(full.abstract.params))
    saved = bytes_of["full"].temp_size_in_bytes - bytes_of["lora"].temp_size_in_bytes
    assert saved > 0.8 * base
