"""Nothing random depends on the mesh: initial weights bit for bit, dropout, and evaluation."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.train import step
from moejax.train.state import build_program, init_state
from tests.models.running import lively
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    ONE,
    mesh_of,
    named,
    relative_error,
)
from tests.sharded.stepping import FAST_COMPILE, MODEL, config, put_batch, rows

SHARDED = [FSDP8, EXPERT8, FSDP2_EXPERT4, DATA2_FSDP2_EXPERT2]
SHORT = dataclasses.replace(MODEL, num_layers=2, attention="kda,dsa")
# Cheap to compile: what is dropped does not depend on the kind of attention.
DROPPING = dataclasses.replace(MODEL, num_layers=2, attention="mla", dropout=0.3)


@functools.cache
def initial(mesh_items: tuple, seed: int = 0):
    sizes = dict(mesh_items)
    program = build_program(config(sizes, SHORT), mesh_of(sizes))
    return program, init_state(program, seed)


@pytest.mark.parametrize("sizes", SHARDED, ids=named)
def test_initial_state_is_the_same_bit_for_bit(sizes):
    program, state = initial(tuple(sizes.items()))
    _, whole = initial(tuple(ONE.items()))
    for (path, leaf), want in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(whole), strict=True
    ):
        np.testing.assert_array_equal(leaf, want, err_msg=jax.tree_util.keystr(path))
    for leaf, where in zip(jax.tree.leaves(state), jax.tree.leaves(program.shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)


def test_layers_and_seeds_differ():
    _, state = initial(tuple(ONE.items()))
    _, other = initial(tuple(ONE.items()), 1)
    kda, dsa = (state.params["stack0"][run]["attn"]["o"] for run in ("run0", "run1"))
    assert not np.array_equal(kda, dsa)
    tables = [s.params["embed"]["table"] for s in (state, other)]
    assert not np.array_equal(*tables)


@functools.cache
def losses(mesh_items: tuple) -> dict[str, float]:
    """Losses of one set of weights: at steps 0 and 1, in two microbatches, and evaluated."""
    sizes = dict(mesh_items)
    program = build_program(config(sizes, DROPPING), mesh_of(sizes))
    _, params, balance = lively(DROPPING)
    params = jax.device_put(params, program.shardings.params)

    def run(params, batch, halves):
        fold = lambda number: jax.random.fold_in(jax.random.key(0), number)  # noqa: E731
        keys = jax.vmap(fold)(np.arange(2))
        counts = step._counts(batch)
        first = jax.tree.map(lambda a: a[0], batch)
        loss = lambda micro, key: step.micro_loss(  # noqa: E731
            program, params, balance, micro, counts, key
        )[1]["loss"]
        total, labels = step.eval_step(program, params, balance, batch)
        by_step = jax.lax.map(lambda key: loss(first, key), keys)
        by_half = jax.lax.map(lambda half: loss(*half), (halves, keys))
        return {
            "step 0": by_step[0],
            "step 1": by_step[1],
            "halves": by_half.sum(),
            "evaluated": total / labels,
        }

    with jax.set_mesh(program.mesh):
        jitted = jax.jit(run, compiler_options=FAST_COMPILE)
        out = jitted(params, put_batch(program, 1), put_batch(program, 2))
    return {name: float(value) for name, value in out.items()}


@pytest.mark.parametrize("sizes", SHARDED, ids=named)
def test_dropout_and_evaluation_do_not_depend_on_the_mesh(sizes):
    got, want = losses(tuple(sizes.items())), losses(tuple(ONE.items()))
    for name in want:
        assert relative_error(got[name], want[name]) <= 1e-6, name
    # Far above what the meshes may differ by: every key draws masks of its own.
    values = sorted(want.values())
    assert np.all(np.isfinite(values)) and min(np.diff(values)) > 1e-4, want


def test_rows_have_the_parts_that_the_tests_speak_of():
    batch = rows()
    documents = [len(set(row) - {0}) for row in batch["segment_ids"]]
    assert max(documents) == 3 and min(documents) >= 2
    assert np.any(batch["segment_ids"] == 0, axis=1).all()
    assert np.all(batch["labels"][batch["segment_ids"] == 0] == -100)
    assert np.any(batch["labels"][batch["segment_ids"] > 0] == -100)
