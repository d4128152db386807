"""Frozen parameters: no gradient, no optimizer state, the same bits; the others train as ever."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ConfigError, RunConfig
from moejax.config.load import load_config
from moejax.models.flops import matmul_params_per_token, train_flops_per_token
from moejax.partitioning import make_mesh
from moejax.train.evaluate import put_batch
from moejax.train.state import build_program, init_state
from moejax.train.step import gradients, train_step
from moejax.train.trainable import merge, split
from tests.cli.conftest import SMALL

PATTERNS = ("*.router.*", "*norm*")
TWO_LAYERS = SMALL | {
    "model.num_layers": 2, "model.attention": "kda", "model.ffn.num_dense_layers": 1,
    "model.moe.num_experts": 8, "optim.name": "muon", "mesh.expert": 2,
}  # fmt: skip


def _config(**changes) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return load_config("tiny", TWO_LAYERS | named)


@pytest.fixture(scope="module")
def stepped():
    """A program with frozen bfloat16 weights, its state before and after a step, both gradients."""
    cfg = _config(train__trainable=PATTERNS, train__frozen_dtype="bfloat16")
    program = build_program(cfg, make_mesh(cfg.mesh))
    everything = build_program(_config(), program.mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (8, 32), np.int32)
    batch = {"tokens": tokens, "labels": tokens, "segment_ids": np.ones_like(tokens)}
    batch = put_batch(program, batch, 1)
    state = init_state(program, 0)
    compile_fast = functools.partial(
        jax.jit, compiler_options={"xla_backend_optimization_level": 0}
    )
    with jax.set_mesh(program.mesh):
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), state.params)
        full = compile_fast(lambda s, b: gradients(everything, s, b)[0])
        part = compile_fast(lambda s, b: (gradients(program, s, b)[0], train_step(program, s, b)))
        want = full(state._replace(params=wide), batch)
        got, (after, metrics) = part(state, batch)
    assert bool(metrics["finite"])
    return program, state, after, want, got


def test_gradients_of_the_trained_are_those_of_the_full_run(stepped):
    program, _, _, want, got = stepped
    want = split(want, program.trains)[0]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert 0 < len(jax.tree.leaves(got)) < len(jax.tree.leaves(program.trains))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_a_step_leaves_frozen_parameters_their_bits_and_moves_the_others(stepped):
    program, before, after, _, _ = stepped
    (trained, frozen), (new, kept) = (split(s.params, program.trains) for s in (before, after))
    for one, other in zip(jax.tree.leaves(frozen), jax.tree.leaves(kept), strict=True):
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    for one, other in zip(jax.tree.leaves(trained), jax.tree.leaves(new), strict=True):
        assert one.dtype == other.dtype == jnp.float32
        assert not np.array_equal(one, other)


def test_frozen_parameters_are_small_and_have_no_optimizer_state(stepped):
    program, state, *_ = stepped
    trained, frozen = split(program.abstract.params, program.trains)
    dtypes = {
        info.name.rpartition(".")[2]: leaf.dtype
        for info, leaf in zip(
            jax.tree.leaves(split(program.parts.infos, program.trains)[1]),
            jax.tree.leaves(frozen), strict=True,
        )
    }  # fmt: skip
    rounded = {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16}
    # Decay rates and short convolutions lose their meaning when rounded.
    assert {"gate_up", "down", "table"} <= rounded
    assert not rounded & {"a_log", "dt_bias", "q_conv"} and "a_log" in dtypes
    held = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state.opt_state))
    of_trained = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trained))
    assert of_trained <= held <= 2 * of_trained + 10


def test_split_and_merge_are_inverse():
    mask = {"a": True, "b": {"c": False, "d": True}, "e": {"f": False}}
    tree = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}
    trained, frozen = split(tree, mask)
    assert trained == {"a": 1, "b": {"d": 3}} and frozen == {"b": {"c": 2}, "e": {"f": 4}}
    assert merge(trained, frozen) == tree


def test_a_frozen_weight_costs_two_flops_less(stepped):
    program = stepped[0]
    every = jax.tree.map(lambda _: True, program.trains)
    gain = train_flops_per_token(program.parts, 32, every)
    gain -= train_flops_per_token(program.parts, 32, program.trains)
    frozen = jax.tree.map(lambda trained: not trained, program.trains)
    assert gain == 2 * matmul_params_per_token(program.parts, frozen) > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train__trainable": ("*.nothing.*",)}, "'*.nothing.*' matches no parameter"),
        ({"train__trainable": PATTERNS, "optim__qk_clip": 100.0}, "Set optim.qk_clip=0"),
        ({"train__trainable": PATTERNS, "optim__ema_decay": 0.9}, "Set optim.ema_decay=0"),
        ({"train__frozen_dtype": "bfloat16"}, "has no effect"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, says):
    cfg = _config(**changes)
    with pytest.raises(ConfigError) as refused:
        cfg.check(8)
        build_program(cfg, make_mesh(cfg.mesh))
    assert says in str(refused.value)
