"""Loss and gradients do not depend on which axes cross hosts: `mesh.dcn` only moves devices."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import pytest

from moejax.config import (
    DsaConfig,
    FfnConfig,
    MeshConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
    RunConfig,
)
from moejax.config.mesh import DcnConfig
from moejax.partitioning import make_mesh
from moejax.planner.aot import abstract_arguments
from moejax.train import step
from moejax.train.state import build_program, init_state
from tests.sharded.meshes import assert_leaves_agree, relative_error
from tests.sharded.stepping import FAST_COMPILE

B, T, VOCAB = 8, 19, 64
SIZES = {"data": 2, "fsdp": 2, "expert": 2}
MODEL = ModelConfig(
    vocab_size=VOCAB, dim=32, num_layers=1, attention="mla", last_attention="", attn_res_block=0,
    init_std=0.2,
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=8),
    dsa=DsaConfig(num_heads=2, head_dim=8, top_k=6), ffn=FfnConfig(num_dense_layers=0),
    moe=MoeConfig(num_experts=8, top_k=2, expert_dim=16, latent_dim=16, buffer_factor=0.5),
)  # fmt: skip


def laid_out(dcn: dict[str, int]) -> MeshConfig:
    return MeshConfig(**SIZES, dcn=DcnConfig(**dcn))


@functools.cache
def gradients(dcn_items: tuple) -> tuple[dict, dict]:
    """Gradients and measured values of one batch, with the axes that cross two hosts."""
    cfg = RunConfig(model=MODEL, mesh=laid_out(dict(dcn_items)))
    program = build_program(cfg, make_mesh(cfg.mesh))
    tokens = np.random.default_rng(3).integers(0, VOCAB, (1, B, T), dtype=np.int32)
    batch = {"tokens": tokens, "labels": np.roll(tokens, -1, 2), "segment_ids": tokens * 0 + 1}
    with jax.set_mesh(program.mesh):
        batch = jax.device_put(batch, step.batch_sharding(program))
        run = jax.jit(
            lambda state, batch: step.gradients(program, state, batch),
            compiler_options=FAST_COMPILE,
        )
        return jax.tree.map(np.asarray, run(init_state(program, 0), batch))


@pytest.mark.parametrize("axis", [pytest.param("fsdp", marks=pytest.mark.slow), "expert"])
def test_an_axis_that_crosses_hosts_changes_nothing(axis):
    got, measured = gradients(((axis, 2),))
    want, expected = gradients(())
    assert relative_error(measured["loss"], expected["loss"]) <= 1e-6
    assert_leaves_agree(got, want, 1e-5)
    moved = make_mesh(laid_out({axis: 2})).devices != make_mesh(laid_out({})).devices
    assert moved.any()  # so that it is another program


def test_the_outermost_axis_crosses_first_anyway():
    """Devices are listed host by host: `data` over the hosts is the mesh without `mesh.dcn`."""
    assert make_mesh(laid_out({"data": 2})) == make_mesh(laid_out({}))


def test_gradients_of_the_vocabulary_tables_are_scattered():
    """Of a table's gradient a device gets its share, never the whole.

    Two tables, each over two devices along `fsdp` and then two along `expert`.
    """
    cfg = RunConfig(model=MODEL, mesh=laid_out({}))
    program = build_program(cfg, make_mesh(cfg.mesh))
    state, batch = abstract_arguments(program)
    with jax.set_mesh(program.mesh):
        lowered = jax.jit(lambda s, b: step.gradients(program, s, b)).lower(state, batch)
    scattered = re.findall(
        r"stablehlo.reduce_scatter.*?\(tensor<2x(\d+)x(\d+)xf32>\)", lowered.as_text(), re.S
    )
    for width in (MODEL.dim // 2, MODEL.dim // 4):
        assert scattered.count((str(VOCAB), str(width))) == 2
