"""The sharded optimizer on 8 devices: equal to one device, few exchanges, state stored in place."""

import collections
import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from moejax.config import OptimConfig
from moejax.optim import build_optimizer, global_norm, state_shardings
from moejax.optim.adamw import clip_by_global_norm

CFG = OptimConfig(ema_decay=0.9, groups=(("router", 0.5, 0.05),))
MESHES = [dict(fsdp=2, expert=4), dict(fsdp=8), dict(data=2, fsdp=2, expert=2)]
_EXCHANGE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def make_step(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.fixture(scope="module")
def one_device(toy):
    """Parameters before and after three updates, and the state."""
    tx = build_optimizer(CFG, 10, toy.infos())
    start = params = toy.random(0, 0.1)
    state, step = tx.init(params), jax.jit(make_step(tx))
    for seed in (1, 2, 3):
        params, state = step(params, state, toy.random(seed))
    return start, params, state


def on_mesh(toy, mesh):
    """The same three updates with everything sharded, and the compiled step."""
    stored = toy.shardings(mesh)
    tx = build_optimizer(CFG, 10, toy.infos())
    params = jax.device_put(toy.random(0, 0.1), stored)
    places = state_shardings(jax.eval_shape(tx.init, params), params, stored)
    state = jax.jit(tx.init, out_shardings=places)(params)
    step = jax.jit(make_step(tx), out_shardings=(stored, places))
    with jax.set_mesh(mesh):
        grads = [jax.device_put(toy.random(seed), stored) for seed in (1, 2, 3)]
        compiled = step.lower(params, state, grads[0]).compile()
        for grad in grads:
            params, state = compiled(params, state, grad)
    return params, state, compiled


def assert_same_change(got, want, start):
    """Change since the start agrees to 1e-5 of its size, leaf by leaf."""
    for (path, a), b, s in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(want),
        jax.tree.leaves(start),
        strict=True,
    ):
        error = np.linalg.norm(np.asarray(a) - np.asarray(b))
        size = np.linalg.norm(np.asarray(b) - np.asarray(s))
        assert error <= 1e-5 * size, f"{jax.tree_util.keystr(path)}: {error / size:.1e}"


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_three_updates_equal_one_device(toy, one_device, sizes):
    start, want, want_state = one_device
    params, state, compiled = on_mesh(toy, toy.make_mesh(**sizes))
    assert_same_change(params, want, start)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    count = collections.Counter(_EXCHANGE.findall(compiled.as_text()))
    # The 27 matrices have four shapes (8x32, 32x32, 16x32, 16x16), each one exchange in and one
    # out; where an axis repeats the parameters, one more to repeat the result.
    assert count["all-to-all"] <= 2 * 4, count
    assert count["all-gather"] <= (4 if "data" in sizes else 0), count
    # The global norm, for each set of axes that parameters are stored over.
    assert count["all-reduce"] <= 3, count
    assert count["collective-permute"] + count["reduce-scatter"] == 0, count


def test_state_lies_with_its_parameters(toy):
    mesh = toy.make_mesh(fsdp=2, expert=4)
    stored, params = toy.shardings(mesh), toy.random(0)
    tx = build_optimizer(CFG, 10, toy.infos())
    state = jax.eval_shape(tx.init, params)
    places = state_shardings(state, params, stored)
    assert jax.tree.structure(places) == jax.tree.structure(state)
    by_path = {
        jax.tree_util.keystr(path): s.spec
        for path, s in jax.tree_util.tree_leaves_with_path(places)
    }
    gate_up = [s for path, s in by_path.items() if path.endswith("['kda']['gate_up']")]
    assert gate_up == [P("stage", None, ("expert", "fsdp"), None, None, "tensor")] * 2
    embed = [s for path, s in by_path.items() if path.endswith("['embed']")]
    assert embed == [P("tensor", ("fsdp", "expert"))] * 3
    assert {s for path, s in by_path.items() if path.endswith(("count", "step"))} == {P()}
    with pytest.raises(ValueError, match="belongs to a parameter of shape"):
        state_shardings({"embed": params["kda"]["norm"]}, params, stored)
    with pytest.raises(ValueError, match="must be a scalar or shaped as its parameter"):
        state_shardings({"stray": params["kda"]["norm"]}, params, stored)


def test_norm_and_clipping_do_not_depend_on_the_mesh(toy):
    grads = toy.random(5)
    tx = clip_by_global_norm(1.0)

    def clip(tree):
        return global_norm(tree), tx.update(tree, optax.EmptyState())[0]

    norm, want = jax.jit(clip)(grads)
    for sizes in MESHES:
        stored = toy.shardings(toy.make_mesh(**sizes))
        got_norm, got = jax.jit(clip)(jax.device_put(grads, stored))
        np.testing.assert_allclose(got_norm, norm, rtol=1e-6)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6)
