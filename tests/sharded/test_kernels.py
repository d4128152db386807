"""The loss and every gradient of a step do not depend on which implementation runs an operator.

Kernels for devices that are not here run in Pallas' interpreter.
"""

import functools

import jax
import numpy as np
import pytest

from moejax.config import KdaConfig, KernelsConfig, MlaConfig
from moejax.train import step
from moejax.train.state import build_program
from pallas_kernels.choose import Choice, recording
from tests.models.running import lively
from tests.sharded import stepping
from tests.sharded.meshes import FSDP2_EXPERT4, ONE, assert_leaves_agree, mesh_of, named

TOLERANCE = 1e-5
# One layer of each attention with experts, in widths that kernels take.
MODEL = stepping.MODEL.replace(
    num_layers=2, attention="kda,dsa", attn_res_block=1,
    kda=KdaConfig(num_heads=2, head_dim=16, value_head_dim=16, decay_rank=8, chunk=16),
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=16, rope_dim=16, value_dim=16),
    ffn=stepping.MODEL.ffn.replace(num_dense_layers=0),
)  # fmt: skip
ROWS = 8


@functools.cache
def _weights() -> tuple:
    _, params, balance = lively(MODEL, seed=1)
    return jax.tree_util.tree_map_with_path(stepping.calmer, params), balance


@functools.cache
def _gradients(mesh_items: tuple, impl: str) -> tuple[dict, float, dict[str, Choice]]:
    """Gradients, loss, and what ran the operators."""
    sizes = dict(mesh_items)
    cfg = stepping.config(sizes, MODEL).replace(kernels=KernelsConfig(impl=impl))
    program = build_program(cfg, mesh_of(sizes))
    params, balance = _weights()
    state = program.abstract._replace(params=params, balance=balance)
    batch = {n: a[:, :ROWS] for n, a in stepping.put_batch(program, 1).items()}

    @functools.partial(jax.jit, compiler_options=stepping.FAST_COMPILE)
    def run(params, balance, batch):
        return step.gradients(program, state._replace(params=params, balance=balance), batch)

    where = program.shardings
    with recording() as choices, jax.set_mesh(program.mesh):
        placed = jax.device_put((params, balance), (where.params, where.balance))
        grads, measured = run(*placed, batch)
    return jax.tree.map(np.asarray, grads), float(measured["loss"]), choices


def _assert_as_chunked(sizes: dict[str, int], impl: str, ops: set[str]) -> None:
    grads, loss, choices = _gradients(tuple(sizes.items()), impl)
    expected, expected_loss, _ = _gradients(tuple(ONE.items()), "chunked")
    assert {op for op, made in choices.items() if impl in {one.impl for one in made}} >= ops
    assert abs(loss - expected_loss) <= TOLERANCE * abs(expected_loss)
    assert_leaves_agree(grads, expected, TOLERANCE)


GPU = {
    "attn_res", "gated_norm", "grouped_matmul", "kda.kda_fused", "lightning_indexer",
    "linear_xent", "permute", "permute.unpermute", "sparse_flash_attention",
}  # fmt: skip
TPU = {"attn_res", "gated_norm", "grouped_matmul", "kda.kda_fused"}


def test_kernels_for_gpus():
    _assert_as_chunked(ONE, "pallas_gpu", GPU)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "impl", "ops"),
    [
        (ONE, "pallas_tpu", TPU),
        (ONE, "ref", GPU),
        (FSDP2_EXPERT4, "pallas_gpu", GPU),
        (FSDP2_EXPERT4, "pallas_tpu", TPU),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else named(value) if isinstance(value, dict) else ""
    ),
)
def test_other_kernels_and_meshes(sizes, impl, ops):
    _assert_as_chunked(sizes, impl, ops)
