"""Weights, gradients and optimizer state live in shards; no activation moves whole."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config.load import load_config
from moejax.models.parts import flat_infos
from moejax.partitioning import BATCH_AXES, ParamInfo
from moejax.train.state import build_program
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    FSDP8,
    mesh_of,
    named,
)
from tests.sharded.stepping import B, T, steps

EIGHT = [FSDP8, EXPERT8, FSDP2_EXPERT4, DATA2_FSDP2_EXPERT2]


def mesh_axes(spec) -> set[str]:
    """Mesh axes in a PartitionSpec that have more than one device in these tests."""
    flat = [axis for e in spec if e for axis in ((e,) if isinstance(e, str) else e)]
    return set(flat) & set(BATCH_AXES)


def is_dense_weight(info: ParamInfo) -> bool:
    return ".experts." not in info.name and ("embed" in info.axes or "latent" in info.axes)


@pytest.fixture(scope="module")
def tiny():
    return build_program(load_config("tiny"), mesh_of(FSDP2_EXPERT4))


def test_weights_of_tiny_spread_over_fsdp_and_expert(tiny):
    """Dense weights over fsdp x expert; experts over expert x fsdp, 2 of 16 a device."""
    infos, leaves = flat_infos(tiny.parts.infos), jax.tree.leaves(tiny.parts.params)
    shardings = jax.tree.leaves(tiny.shardings.params)
    left, total = 0, 0
    for info, leaf, where in zip(infos, leaves, shardings, strict=True):
        total += leaf.size
        if ".experts." in info.name:
            assert where.spec[info.stack] == ("expert", "fsdp"), info.name
        elif is_dense_weight(info):
            assert ("fsdp", "expert") in tuple(where.spec), info.name
        else:
            assert info.matrix is None, info.name  # norms, queries, decay rates, short taps
            left += leaf.size
        in_one_shard = math.prod(where.shard_shape(leaf.shape))
        ways = 8 if mesh_axes(where.spec) else 1
        assert in_one_shard * ways == leaf.size, info.name
    assert left < 0.02 * total


def test_optimizer_state_of_tiny_lies_with_its_parameters(tiny):
    """Each moment is stored as its parameter, so a device holds about an eighth of them all."""
    params = jax.tree.leaves(tiny.parts.params)
    by_shape: dict[tuple, set] = {}
    for leaf, where in zip(params, jax.tree.leaves(tiny.shardings.params), strict=True):
        by_shape.setdefault(leaf.shape, set()).add(where.spec)
    states = jax.tree.leaves(tiny.abstract.opt_state)
    places = jax.tree.leaves(tiny.shardings.opt_state)
    stored = 0
    for leaf, where in zip(states, places, strict=True):
        if leaf.ndim:
            assert where.spec in by_shape[leaf.shape]
            stored += math.prod(where.shard_shape(leaf.shape))
    total = sum(leaf.size for leaf in states if leaf.ndim)
    assert total >= sum(leaf.size for leaf in params)
    assert stored <= 1.2 * total / 8


# fsdp alone is among the slow tests.
MESHES = pytest.mark.parametrize(
    "sizes",
    [s if len(s) > 1 else pytest.param(s, marks=pytest.mark.slow) for s in EIGHT],
    ids=named,
)


@MESHES
def test_the_compiled_step_keeps_that_layout(sizes):
    """State out as in; gradients, for which nothing was asked, as their parameters."""
    run = steps(tuple(sizes.items()))
    state, grads = run.placed
    for got, want, leaf in zip(
        jax.tree.leaves((state, grads)),
        jax.tree.leaves((run.program.shardings, run.program.shardings.params)),
        jax.tree.leaves((run.program.abstract, run.program.abstract.params)),
        strict=True,
    ):
        assert got.is_equivalent_to(want, len(leaf.shape))


_COLLECTIVE = re.compile(
    r" = (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(.*"
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_SOURCE = re.compile(r'op_name="([^"]*)"')


def whole_activations(hlo: str) -> list[str]:
    """Collectives whose result has more rows of the batch than one device's, and their source."""
    found = []
    for match in _COLLECTIVE.finditer(hlo):
        for dims in _SHAPE.findall(match[1]):
            shape = [int(n) for n in dims.split(",") if n]
            pairs = zip(shape, shape[1:], strict=False)
            rows = [n for n, following in pairs if following == T]
            rows += [n // T for n in shape if n % T == 0]
            if max(rows, default=0) > B // 8:
                source = _SOURCE.search(match[0])
                found.append(f"{match[2]} {shape} from {source[1] if source else '?'}")
    return found


@MESHES
def test_no_collective_moves_an_activation_of_the_whole_batch(sizes):
    run = steps(tuple(sizes.items()))
    assert len(_COLLECTIVE.findall(run.hlo)) > 10
    assert not (found := whole_activations(run.hlo)), "\n".join(found)


def test_the_search_finds_a_gathered_activation():
    mesh = mesh_of(FSDP2_EXPERT4)
    rows, whole = NamedSharding(mesh, P(BATCH_AXES)), NamedSharding(mesh, P())
    x_BTD = jax.device_put(np.ones((B, T, 4), np.float32), rows)
    gather = jax.jit(lambda x: jnp.sin(x), out_shardings=whole)
    (found,) = whole_activations(gather.lower(x_BTD).compile().as_text())
    assert found.startswith("all-gather [32, 41, 4]")
