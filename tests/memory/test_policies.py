"""Policies change no number: a LoRA run with dropout has the same losses under all of them."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.memory.names import KNOWN, tag
from moejax.memory.policy import Policy, policy_for
from moejax.partitioning import make_mesh
from moejax.train.auto_memory import with_chosen_memory
from moejax.train.state import build_program, init_state
from moejax.train.step import train_step

# A KDA layer and a DSA layer, both with experts on two devices.
TOY = {
    "model.dim": 32, "model.num_layers": 2, "model.attention": "kda,dsa",
    "model.last_attention": "", "model.ffn.num_dense_layers": 0, "model.attn_res_block": 1,
    "model.moe.num_experts": 4, "model.moe.top_k": 2, "model.moe.latent_dim": 16,
    "data.seq_len": 32, "data.batch_size": 2, "eval.batch_size": 2, "mesh.fsdp": 1,
    "mesh.expert": 2, "lora.rank": 2, "lora.targets": ("q_proj", "k_proj", "gate"),
    "lora.dropout": 0.25, "model.dsa.stage": "frozen", "optim.name": "adamw",
    "optim.qk_clip": 0.0, "train.num_steps": 10,
}  # fmt: skip
POLICIES = {
    "full": {"train.remat": "full"},
    "dots": {"train.remat": "dots"},
    "exchange": {"train.remat": "exchange"},
    "names": {
        "train.remat": "full", "swap.keep": ("kda_qkv", "attended"),
        "swap.offload": ("moe_returned", "attention_out", "chosen_keys"),
    },
}  # fmt: skip


def program_of(changes: dict):
    cfg = load_config("tiny", {**TOY, **changes})
    mesh = make_mesh(cfg.mesh, jax.devices()[:2])
    return build_program(with_chosen_memory(cfg, mesh)[0], mesh)


def batches_of(cfg, steps: int):
    rows = (1, cfg.data.batch_size, cfg.data.seq_len)
    tokens = jax.random.randint(jax.random.key(1), (steps, *rows), 0, 200, jnp.int32)
    ones = jnp.ones_like(tokens)
    return {"tokens": tokens, "labels": jnp.roll(tokens, -1, -1), "segment_ids": ones}


def curve(changes: dict, steps: int):
    """Losses and gradient norms of the steps."""
    program = program_of(changes)
    batches = batches_of(program.cfg, steps)
    with jax.set_mesh(program.mesh):
        run = jax.jit(lambda state, batch: train_step(program, state, batch))
        state, seen = init_state(program, 0), []
        for step in range(steps):
            state, metrics = run(state, jax.tree.map(lambda a, step=step: a[step], batches))
            seen.append((metrics["loss"], metrics["grad_norm"]))
    return np.asarray(seen)


@pytest.mark.slow
def test_kept_and_offloaded_names_change_no_loss():
    """As compiled for speed: what is fused otherwise rounds otherwise, in the gradients alone."""
    usual = curve({"train.remat": "none"}, 2)
    other = curve(POLICIES["names"], 2)
    assert usual[0, 0] != usual[1, 0] and usual[0, 0] == other[0, 0]
    np.testing.assert_allclose(usual, other, rtol=1e-5)


@pytest.mark.slow
def test_ten_steps_have_the_same_bits_under_every_policy():
    """Loss, gradient norm, weights and optimizer state, where fusions round nothing otherwise."""
    root = pathlib.Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.memory.policy_bits"], cwd=root, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    usual, without = found.pop("none"), found.pop("without dropout")
    assert len(usual) == len(set(usual)) == 10
    assert usual[0] != without[0], "dropout must act for the test to mean anything"
    assert set(found) == {*POLICIES, "auto"}
    for name, other in found.items():
        assert other == usual, name


def test_presets_keep_what_they_say():
    assert policy_for("none").everything
    assert policy_for("full") == Policy()
    dots = policy_for("dots", offload=("kda_qkv",))
    assert dots.of("kda_qkv") == "offload" and dots.of("moe_router") == "keep"
    assert dots.of("moe_returned") == "recompute"
    assert set(policy_for("exchange").keep) == {"moe_dispatched", "moe_returned"}
    with pytest.raises(ValueError, match="policy 'half' is unknown"):
        policy_for("half")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("full", ("kda_qk",)), "swap.keep has 'kda_qk'.*Did you mean kda_qkv.*Known: kda_qkv"),
        (("full", ("kda_qkv",), ("kda_qkv",)), "both have 'kda_qkv'"),
        (("none", (), ("kda_qkv",)), "has no effect with train.remat=none"),
    ],
)
def test_names_that_cannot_be_followed_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        policy_for(*args)


def test_a_name_that_the_model_does_not_have_is_refused():
    program = program_of({"train.remat": "full", "swap.keep": ("indexer_maps", "mla_gate")})
    assert program.cfg.swap.keep == ("indexer_maps", "mla_gate")
    other = program_of(
        {"train.remat": "full", "swap.keep": ("mla_gate",), "model.attention": "kda"}
    )
    rows = jax.ShapeDtypeStruct((1, 2, 32), jnp.int32)
    with jax.set_mesh(other.mesh), pytest.raises(ConfigError, match="'mla_gate'.*Known: kda_qkv"):
        jax.eval_shape(
            lambda state, batch: train_step(other, state, batch),
            other.abstract, dict.fromkeys(("tokens", "labels", "segment_ids"), rows),
        )  # fmt: skip


def test_only_listed_names_are_tagged():
    assert len(KNOWN) == 17
    with pytest.raises(ValueError, match="'rows' is no name"):
        tag(jnp.ones(2), "rows")
