"""Bookkeeping of the ragged exchange: every row arrives once, in one piece, and comes home.

The devices are played by NumPy here; only sizes and offsets come from the code under test.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moejax.partitioning.expert_exchange.plan import arrival_plan, turn_runs, turns_of
from moejax.partitioning.expert_exchange.ragged import receive_rows

P, LOCAL, ROWS = 4, 3, 13  # a prime number of rows on every device


@functools.cache
def compiled(capacity: int):
    """(counts, device, turn) -> (runs there, runs back, arrival plan), and the number of turns."""

    def run(counts_PE, me, turn):
        there, back = turn_runs(counts_PE, me, turn, capacity)
        mine_Pe = jax.lax.dynamic_slice_in_dim(counts_PE, me * LOCAL, LOCAL, 1)
        return there, back, arrival_plan(mine_Pe, turn, capacity)

    return jax.jit(run), jax.jit(lambda counts: turns_of(counts, capacity))


def send(arrays: list[np.ndarray], outputs: list[np.ndarray], runs: list) -> None:
    """What a ragged all-to-all means, in loops; sender and receiver must agree on every size."""
    for source, target in np.ndindex(P, P):
        start, size, to = (int(a[target]) for a in runs[source][:3])
        assert size == runs[target].recv_sizes[source]
        assert 0 <= start <= start + size <= len(arrays[source])
        assert 0 <= to <= to + size <= len(outputs[target])
        outputs[target][to : to + size] = arrays[source][start : start + size]


def sorted_rows(counts_PE: np.ndarray) -> list[np.ndarray]:
    """Every device's rows [R, 3] sorted by expert: (device, number, expert), -1 for no expert."""
    out = []
    for device, counts_E in enumerate(counts_PE):
        experts = np.repeat(np.arange(P * LOCAL), counts_E)
        experts = np.concatenate([experts, np.full(ROWS - len(experts), -1)])
        number = np.arange(ROWS)
        out.append(np.stack([np.full(ROWS, device), number, experts], 1))
    return out


def check(counts_PE: np.ndarray, capacity: int) -> None:
    run, turns_of = compiled(capacity)
    counts_PE = counts_PE.astype(np.int32)
    sent = sorted_rows(counts_PE)
    home = [np.full((ROWS, 3), -1) for _ in range(P)]
    turns = int(turns_of(counts_PE))
    by_device_P = counts_PE.reshape(P, P, LOCAL).sum((0, 2))
    assert turns == math.ceil(by_device_P.max() / capacity)
    for turn in range(turns):
        there, back, plans = zip(
            *(jax.tree.map(np.asarray, run(counts_PE, d, turn)) for d in range(P)), strict=True
        )
        slots = [np.full((capacity, 3), -1) for _ in range(P)]
        send(sent, slots, there)
        for device, (rows, plan) in enumerate(zip(slots, plans, strict=True)):
            num_real = min(max(by_device_P[device] - turn * capacity, 0), capacity)
            assert plan.group_sizes.sum() == num_real  # a turn is full, or the last
            assert np.all(rows[num_real:] == -1)
            experts = np.repeat(device * LOCAL + np.arange(LOCAL), plan.group_sizes)
            np.testing.assert_array_equal(rows[plan.order][:num_real, 2], experts)
            np.testing.assert_array_equal(plan.order[plan.positions[:, 0]], np.arange(capacity))
        send(slots, home, back)
    for mine, came in zip(sent, home, strict=True):
        real = mine[:, 2] >= 0
        np.testing.assert_array_equal(came[real], mine[real])
        assert np.all(came[~real] == -1)


@st.composite
def any_counts(draw):
    """Rows for every expert, from even to all on one, with devices that send little or nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    out = []
    for _ in range(P):
        total = draw(st.sampled_from([0, 1, ROWS // 2, ROWS]))
        spread = draw(st.sampled_from([0.05, 0.5, 50.0]))
        out.append(rng.multinomial(total, rng.dirichlet(np.full(P * LOCAL, spread))))
    return np.stack(out)


@pytest.mark.parametrize("capacity", [1, 8, 16, P * ROWS])
def test_every_row_arrives_once_and_comes_home(capacity):
    hot = np.zeros((P, P * LOCAL), int)
    hot[:, 7] = ROWS

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(any_counts())
    @example(hot)
    @example(np.zeros((P, P * LOCAL), int))
    def run(counts_PE):
        check(counts_PE, capacity)

    run()


def test_size_of_the_receive_buffer():
    assert receive_rows(1000, 8000, 1.0) == 1000
    assert receive_rows(1001, 8008, 1.25) == 1256  # 1251.25, the next multiple of 8
    assert receive_rows(13, 52, 2.0) == 32
    assert receive_rows(13, 52, 4.0) == receive_rows(13, 52, 99.0) == 52  # all there is
    assert receive_rows(13, 13, 1.25) == 13
    assert receive_rows(1, 4, 0.01) == 4
    assert receive_rows(6.2, 99, 1.0) == 8


def test_counts_are_not_widened():
    """Sizes stay int32 also where 64-bit integers are on: the collectives take one type."""

    def run(counts_PE, me, turn):
        return turn_runs(counts_PE, me, turn, 16), arrival_plan(counts_PE[:, :LOCAL], turn, 16)

    with jax.enable_x64(True):
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        table = jax.ShapeDtypeStruct((P, P * LOCAL), jnp.int32)
        out = jax.tree.leaves(jax.eval_shape(run, table, scalar, scalar))
    assert {a.dtype for a in out} == {jnp.dtype("int32")}
