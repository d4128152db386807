"""State in host memory: the same numbers, the same checkpoints, and where it lies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.checkpoint import Checkpoints
from moejax.checkpoint.base import fingerprint
from moejax.config import ConfigError, RunConfig, as_dict
from moejax.config.load import load_config
from moejax.memory.host_state import PINNED, to_device, update_layers
from moejax.partitioning import make_mesh
from moejax.train.evaluate import put_batch
from moejax.train.host_update import MasterState
from moejax.train.state import (
    abstract_tree,
    as_tree,
    build_program,
    from_tree,
    frozen_leaves,
    init_state,
    with_copies,
)
from moejax.train.step import gradients, train_step
from tests.cli.conftest import SMALL
from tests.memory.test_layer_loop import LOOPS, inputs, objective, start

MLA = SMALL | {
    "model.num_layers": 2, "model.attention": "mla", "model.ffn.num_dense_layers": 2,
    "optim.name": "muon", "train.compute_dtype": "bfloat16", "optim.qk_clip": 0.01,
    "train.remat": "full", "mesh.fsdp": 2, "train.accumulation": 2,
}  # fmt: skip
HOST = {"memory.optimizer": "host", "memory.master": "host"}
FAST = {"xla_backend_optimization_level": 0}


def program_of(changes: dict):
    cfg = load_config("tiny", MLA | changes)
    return build_program(cfg, make_mesh(cfg.mesh, jax.devices()[:2]))


def train(program, state, count=2):
    """The state after steps on random tokens, their losses, and what is saved after the first."""
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "segment_ids": np.ones_like(tokens)}
    batch = put_batch(program, batch, program.cfg.train.accumulation)
    with jax.set_mesh(program.mesh):
        step = jax.jit(
            lambda s, b, most: train_step(program, s, b, most), donate_argnums=0,
            out_shardings=(program.shardings, None), compiler_options=FAST,
        )  # fmt: skip
        losses, trees = [], []
        for _ in range(count):
            state, metrics = step(state, batch, jnp.float32(jnp.inf))
            losses.append(float(metrics["loss"]))
            trees.append(jax.device_get(as_tree(state, 0)))
        before = jax.device_get(state)
        state, _ = step(state, batch, jnp.float32(-jnp.inf))
        for one, other in zip(*map(jax.tree.leaves, (before[:3], state[:3])), strict=True):
            np.testing.assert_array_equal(one, other)  # a bad step changes nothing
    return state, losses, trees[0]


@pytest.fixture(scope="module")
def runs():
    """Program and result of two steps with the state on the devices, and on the host."""
    programs = {"device": program_of({}), "host": program_of(HOST)}
    return {name: (p, *train(p, init_state(p, 0))) for name, p in programs.items()}


def close(one, other):
    """Equal but for the last bits: products of one layer and of all round differently."""
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    assert np.abs(one - other).max() <= 2e-6 * max(np.abs(one).max(), 1e-30)


def test_losses_and_states_are_those_of_a_run_on_the_devices(runs):
    (_, _, losses, *trees), (_, _, same, other) = runs["device"], runs["host"]
    trees.append(other)
    assert losses[0] == same[0] and losses[1] < losses[0]
    np.testing.assert_allclose(losses[1], same[1], rtol=1e-6)
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    jax.tree.map(close, *trees)


def test_narrow_accumulators_and_a_head_in_pieces_round_and_no_more(runs):
    changes = HOST | {"train.accum_dtype": "bfloat16", "memory.loss_gib": 1e-5}
    program = program_of(changes)
    losses = runs["host"][2]
    state, same, _ = train(program, init_state(program, 0))
    np.testing.assert_allclose(losses[0], same[0], rtol=1e-6)  # the loss is not of the gradients
    np.testing.assert_allclose(losses[1], same[1], rtol=1e-2)
    assert losses[1] != same[1]
    batch = {
        name: jax.ShapeDtypeStruct((2, 4, 32), jnp.int32) for name in
        ("tokens", "labels", "segment_ids")
    }  # fmt: skip
    with jax.set_mesh(program.mesh):
        grads, _ = jax.eval_shape(lambda s, b: gradients(program, s, b), state, batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype(jnp.bfloat16)}


def test_moments_and_masters_of_maps_are_on_the_host_and_copies_in_the_compute_dtype(runs):
    program, state, *_ = runs["host"]
    for leaf, hosted in zip(*map(jax.tree.leaves, (state, program.hosted)), strict=True):
        assert (leaf.sharding.memory_kind == PINNED) == hosted
    assert isinstance(state.opt_state, MasterState)
    masters = jax.tree.leaves(state.opt_state.master)
    total = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    assert sum(leaf.size for leaf in masters) > 0.98 * total
    copy = state.params["stack0"]["run0"]["attn"]["k_b"]
    master = state.opt_state.master["stack0"]["run0"]["attn"]["k_b"]
    assert (copy.dtype, master.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(copy, np.asarray(master).astype(copy.dtype))


@pytest.mark.parametrize(
    ("saved", "wanted"), [("host", "host"), ("host", "device"), ("device", "host")]
)
def test_a_checkpoint_of_either_kind_is_restored_into_either(runs, tmp_path, saved, wanted):
    program, state, *_ = runs[saved]
    other = runs[wanted][0]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, as_tree(state, 0), position={}, config=as_dict(program.cfg))
    restored = checkpoints.restore(1, abstract_tree(other)).state
    checkpoints.close()
    again = with_copies(other, from_tree(restored))
    for leaf, where in zip(*map(jax.tree.leaves, (again, other.shardings)), strict=True):
        assert leaf.sharding == where
    for one, two in zip(*(jax.tree.leaves(as_tree(s, 0)) for s in (state, again)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.fixture(scope="module")
def lora_runs():
    """A LoRA run with its base on the devices, and one with it on the host."""
    cfg = {
        "lora.rank": 2, "lora.targets": ("q_b_proj", "o_proj"), "optim.qk_clip": 0.0,
        "optim.name": "adamw", "train.frozen_dtype": "bfloat16",
    }  # fmt: skip
    programs = [program_of(cfg | {"memory.frozen": where}) for where in ("device", "host")]
    return [(p, *train(p, init_state(p, 0))) for p in programs]


def test_a_frozen_base_on_the_host_gives_the_same_bits(lora_runs):
    (_, on_device, losses, _), (program, on_host, same, _) = lora_runs
    assert losses == same and losses[1] < losses[0]
    for one, other in zip(*map(jax.tree.leaves, (on_device, on_host)), strict=True):
        np.testing.assert_array_equal(one, other)
    flags = jax.tree.leaves(program.hosted)
    kinds = [leaf.sharding.memory_kind == PINNED for leaf in jax.tree.leaves(on_host)]
    assert kinds == flags and sum(flags) > 5


def test_a_base_on_the_host_has_the_fingerprint_of_one_on_the_devices(lora_runs):
    marks = [fingerprint(frozen_leaves(p, state.params)) for p, state, *_ in lora_runs]
    assert marks[0] == marks[1] and len(marks[0]) > 10


@pytest.mark.parametrize("loop", LOOPS[::2], ids=str)
def test_layers_streamed_from_the_host_give_the_same_gradients(loop):
    xs, carry, shift = inputs(loop), start(), jnp.arange(3.0)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    frozen = [
        jnp.sin(jnp.arange(x["frozen"].size, dtype=jnp.float32)).reshape(x["frozen"].shape)
        for x in xs
    ]

    @jax.jit
    def run(trained, frozen):
        def loss(trained):
            both = [{"w": w, "frozen": f} for w, f in zip(trained, frozen, strict=True)]
            return objective(both, carry, shift, loop=loop, policy="full")

        return jax.value_and_grad(loss, has_aux=True)(trained)

    trained = [x["w"] for x in xs]
    want, got = run(trained, frozen), run(trained, jax.device_put(frozen, where))
    jax.tree.map(np.testing.assert_array_equal, want, got)


def test_layers_are_changed_in_place_and_shared_values_once():
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    stacked = jax.device_put(jnp.arange(24.0).reshape(2, 3, 4), where)

    def double(changed, read, shared):
        return changed * 2 + read[None] + shared, shared + 1

    @jax.jit
    def run(stacked):
        return update_layers(double, (2, 3), stacked, jnp.ones((2, 3)), jnp.float32(10))

    changed, shared = run(stacked)
    assert changed.sharding.memory_kind == PINNED
    np.testing.assert_array_equal(changed, np.arange(24.0).reshape(2, 3, 4) * 2 + 11)
    assert float(shared) == 11
    assert jax.jit(to_device)(stacked).sharding.memory_kind == "device"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"memory.master": "host"}, "needs memory.optimizer='host'"),
        (HOST | {"train.compute_dtype": "float32"}, "copies would be as large"),
        ({"memory.frozen": "host"}, "all parameters are trained"),
        (
            {
                "memory.frozen": "host",
                "train.trainable": ("*norm*",),
                "train.remat": "none",
                "optim.qk_clip": 0.0,
            },
            "every layer's weights on the devices",
        ),
        ({"memory.optimizer": "host", "placement.every": 2}, "within device memory only"),
    ],
)
def test_a_placement_without_effect_is_one_line(changes, words):
    cfg: RunConfig = load_config("tiny", MLA | changes)
    with pytest.raises(ConfigError, match=words) as error:
        cfg.check(2)
    assert "\n" not in str(error.value)
