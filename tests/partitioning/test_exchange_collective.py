"""The ragged all-to-all of the CPU means what `lax.ragged_all_to_all` does; others lower that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as Spec

from moejax.partitioning.expert_exchange.collective import (
    Link,
    fetch_rows,
    ragged_all_to_all,
    return_rows,
)
from moejax.partitioning.expert_exchange.plan import Runs, turn_runs

P, ROWS, SLOTS = 4, 13, 20
LINK = Link("expert", native=False)


def mesh(ranks: int = P) -> Mesh:
    return Mesh(np.array(jax.devices()[:ranks]), ("expert",), axis_types=(AxisType.Auto,))


def on_devices(fn, ranks: int = P):
    """`fn` per device on arguments whose first dim counts devices."""

    def per_device(*args):
        out = fn(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], out)

    spec = Spec("expert")
    return jax.jit(
        jax.shard_map(per_device, mesh=mesh(ranks), in_specs=spec, out_specs=spec, check_vma=False)
    )


@functools.cache
def exchanged(ranks: int = P):
    return on_devices(functools.partial(ragged_all_to_all, link=LINK), ranks)


def test_the_documented_example():
    """Two devices and arguments from the documentation of `lax.ragged_all_to_all`."""
    operand = jnp.array([[1.0, 2, 2], [3, 4, 0]])[..., None]
    runs = Runs(*(jnp.array(a) for a in (
        [[0, 1], [0, 1]], [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]],
    )))  # fmt: skip
    got = exchanged(2)(operand, jnp.zeros((2, 4, 1)), runs)
    np.testing.assert_array_equal(got[..., 0], [[1, 3, 0, 0], [2, 2, 4, 0]])


def random_runs(seed: int) -> Runs:
    """Runs anywhere in the senders' rows, with gaps between them at the receivers."""
    rng = np.random.default_rng(seed)
    sizes_PP = rng.integers(0, 5, (P, P))
    gaps_PP = rng.integers(0, 2, (P, P))
    to_PP = np.cumsum(sizes_PP + gaps_PP, 0) - sizes_PP
    from_PP = rng.integers(0, ROWS - sizes_PP + 1)
    return Runs(*(a.astype(np.int32) for a in (from_PP, sizes_PP, to_PP, sizes_PP.T)))


@pytest.mark.parametrize("seed", range(4))
def test_equals_copying_run_by_run(seed):
    rng = np.random.default_rng(100 + seed)
    runs = random_runs(seed)
    slots = int((runs.output_offsets + runs.send_sizes).max()) + 1
    operand = rng.standard_normal((P, ROWS, 3)).astype(np.float32)
    want = rng.standard_normal((P, SLOTS + 1, 3)).astype(np.float32)
    assert slots <= SLOTS + 1
    got = exchanged()(operand, want, runs)
    want = want.copy()
    for source, target in np.ndindex(P, P):
        start, size, to = (a[source, target] for a in runs[:3])
        want[target, to : to + size] = operand[source, start : start + size]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fault", ["sizes disagree", "past the rows", "past the slots", "negative"])
def test_runs_that_do_not_fit_give_nan_and_not_other_rows(fault):
    runs = random_runs(0)
    runs = Runs(*(a.copy() for a in runs))
    if fault == "sizes disagree":
        runs.recv_sizes[2, 1] += 1
    if fault == "past the rows":
        runs.input_offsets[1, 2] = ROWS - runs.send_sizes[1, 2] + 1
    if fault == "past the slots":
        runs.output_offsets[1, 2] = SLOTS + 1 - runs.send_sizes[1, 2] + 1
    if fault == "negative":
        runs.output_offsets[1, 2] = -1
    got = exchanged()(np.ones((P, ROWS, 3)), np.zeros((P, SLOTS + 1, 3)), runs)
    assert np.isnan(np.asarray(got)[2]).all()


def moves(counts_PE, turn: int):
    """The two moves of one turn, and their gradients, on P devices."""

    def run(rows_RL, slots_CL, me):
        there, back = turn_runs(counts_PE, me, turn, SLOTS)
        fetched, pull = jax.vjp(lambda x: fetch_rows(x, there, back, LINK, SLOTS), rows_RL)
        home, pull_home = jax.vjp(
            lambda y: return_rows(y, jnp.zeros_like(rows_RL), there, back, LINK), slots_CL
        )
        return fetched, pull(slots_CL)[0], home, pull_home(rows_RL)[0]

    return run


@pytest.mark.parametrize("turn", [0, 1])
def test_each_move_is_the_gradient_of_the_other(turn):
    rng = np.random.default_rng(turn)
    counts_PE = rng.multinomial(ROWS, rng.dirichlet(np.full(2 * P, 0.2)), size=P).astype(np.int32)
    counts_PE[:, 5] += ROWS - counts_PE.sum(1)
    rows = rng.standard_normal((P, ROWS, 3)).astype(np.float32)
    slots = rng.standard_normal((P, SLOTS, 3)).astype(np.float32)
    run = on_devices(moves(jnp.asarray(counts_PE), turn))
    fetched, drows, home, dslots = map(np.asarray, run(rows, slots, np.arange(P, dtype=np.int32)))
    np.testing.assert_array_equal(fetched, dslots)
    np.testing.assert_array_equal(home, drows)
    # <fetch(rows), slots> = <rows, fetch'(slots)>, over all devices together
    left, right = np.sum(fetched.astype(float) * slots), np.sum(rows.astype(float) * drows)
    assert abs(left - right) <= 1e-5 * np.abs(fetched * slots).sum() and np.any(fetched != 0)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_platforms_lower_the_real_collective_and_no_choice(platform):
    args = np.ones((P, ROWS, 3)), np.zeros((P, SLOTS + 1, 3)), random_runs(0)
    run = on_devices(functools.partial(ragged_all_to_all, link=LINK._replace(native=True)))
    text = run.trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert text.count("ragged_all_to_all") == 1
    assert not any(word in text for word in ("all_gather", "stablehlo.case", "stablehlo.if"))
