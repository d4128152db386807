"""Bias step and sequence-wise auxiliary loss are the same on any mesh, split in any way.

Quantile balancing is held to the same in test_step.py, with every other part of a step.
"""

import functools

import jax
import numpy as np
import pytest

from moejax.config import FfnConfig, MlaConfig, ModelConfig, MoeConfig
from moejax.train import step
from moejax.train.state import TrainState, build_program
from tests.models.running import lively
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    FSDP2_EXPERT4,
    ONE,
    assert_leaves_agree,
    mesh_of,
    named,
    relative_error,
)
from tests.sharded.stepping import FAST_COMPILE, VOCAB, config, put_batch, steps

RATE = 0.05
MOE = MoeConfig(
    num_experts=8, top_k=2, expert_dim=16, latent_dim=16, buffer_factor=0.5,
    balance="bias_step", bias_rate=RATE, aux_weight=0.5,
)  # fmt: skip
MODEL = ModelConfig(
    vocab_size=VOCAB, dim=32, num_layers=1, attention="mla", last_attention="", attn_res_block=0,
    mla=MlaConfig(num_heads=2, q_latent=16, kv_latent=16, nope_dim=8, rope_dim=4, value_dim=8),
    ffn=FfnConfig(num_dense_layers=0), moe=MOE,
)  # fmt: skip
TOLERANCE = 1e-5


@functools.cache
def trained(mesh_items: tuple, accumulation: int = 1, remat: str = "none", aux_weight: float = 0.5):
    """Metrics, gradients and balance of one step, and the losses of an evaluation after it."""
    sizes = dict(mesh_items)
    model = MODEL.replace(moe=MOE.replace(aux_weight=aux_weight))
    program = build_program(config(sizes, model, accumulation=accumulation, remat=remat),
                            mesh_of(sizes))  # fmt: skip
    _, params, balance = lively(MODEL, seed=3)
    state = TrainState(params, program.optimizer.init(params), balance, np.int32(0))
    with jax.set_mesh(program.mesh):
        state = jax.device_put(state, program.shardings)
        grads, measured = jax.jit(
            lambda s, b: step.gradients(program, s, b), compiler_options=FAST_COMPILE
        )(state, put_batch(program, accumulation))
        aux = measured["aux"]
        metrics = {
            name: np.asarray(step.by_layer(aux, program.parts.segments, name))
            for name in ("load", "aux_loss")
            if name == "load" or aux_weight
        }
        new = step._next_balance(program, state.balance, aux)
        evaluate = jax.jit(
            lambda p, s, b: step.eval_step(program, p, s, b)[0], compiler_options=FAST_COMPILE
        )
        losses = [evaluate(state.params, b, put_batch(program, 1)) for b in (new, state.balance)]
    as_arrays = functools.partial(jax.tree.map, np.asarray)
    return metrics, as_arrays(grads), as_arrays(new), np.asarray(losses), as_arrays(balance)


SPLIT = [(FSDP2_EXPERT4, 1, "none"), (DATA2_FSDP2_EXPERT2, 2, "full")]


@pytest.mark.parametrize("sizes,accumulation,remat", SPLIT, ids=["mesh", "microbatches-remat"])
def test_bias_step_and_auxiliary_loss(sizes, accumulation, remat):
    metrics, grads, new, losses, _ = trained(tuple(sizes.items()), accumulation, remat)
    want_metrics, want_grads, want_new, want_losses, _ = trained(tuple(ONE.items()))
    np.testing.assert_array_equal(metrics["load"], want_metrics["load"])
    assert relative_error(metrics["aux_loss"], want_metrics["aux_loss"]) <= TOLERANCE
    jax.tree.map(np.testing.assert_array_equal, new, want_new)
    assert_leaves_agree(grads, want_grads, TOLERANCE)
    assert relative_error(losses, want_losses) <= TOLERANCE


def test_both_are_alive():
    """The bias moves by the rate against the load; the loss reaches the router's gradient."""
    metrics, grads, new, losses, before = trained(tuple(ONE.items()))
    (bias,), (old,) = jax.tree.leaves(new), jax.tree.leaves(before)
    load = metrics["load"]
    want = RATE * np.sign(load.mean(-1, keepdims=True) - load)
    np.testing.assert_allclose((bias - old).reshape(want.shape), want, rtol=0, atol=1e-6)
    plain = trained(tuple(ONE.items()), aux_weight=0.0)[1]
    routers = [
        next(g for path, g in jax.tree_util.tree_leaves_with_path(tree) if "router" in str(path))
        for tree in (grads, plain)
    ]
    assert relative_error(*routers) > 0.01
    assert losses[0] != losses[1]  # an evaluation routes by the bias it is given


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [FSDP2_EXPERT4, DATA2_FSDP2_EXPERT2], ids=named)
@pytest.mark.parametrize("accumulation,remat", [(1, "full"), (4, "none")], ids=str)
def test_a_whole_model_trains_the_same(sizes, accumulation, remat):
    """Two updates by the whole step: loss, norm, loads and biases."""
    moe = (("balance", "bias_step"), ("bias_rate", RATE), ("aux_weight", 0.5))
    got = steps(tuple(sizes.items()), accumulation, remat, moe)
    want = steps(tuple(ONE.items()), exchange=moe)
    for mine, theirs in zip(got.metrics, want.metrics, strict=True):
        np.testing.assert_array_equal(mine["load"], theirs["load"])
        for name in ("loss", "grad_norm", "aux_loss"):
            assert relative_error(mine[name], theirs[name]) <= TOLERANCE
    for mine, theirs in zip(got.balance, want.balance, strict=True):
        jax.tree.map(np.testing.assert_array_equal, mine, theirs)
    assert_leaves_agree(got.params, want.params, TOLERANCE)
