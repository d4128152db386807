"""The search for a placement: what always holds of it, and what it gains on skewed loads."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.layers.moe.placement import (
    MAX_PLACES,
    Placement,
    Spread,
    canonical,
    device_loads,
    imbalance,
    look_up,
    place,
    place_tables,
)


@st.composite
def problems(draw):
    """Loads of up to three layers (ties, idle experts and layers among them), and devices."""
    spread = Spread(draw(st.integers(1, 6)), draw(st.integers(0, 3)))
    num_experts = spread.devices * draw(st.integers(1, 5))
    loads = st.lists(
        st.one_of(st.integers(0, 3), st.integers(0, 10**6)),
        min_size=num_experts, max_size=num_experts,
    )  # fmt: skip
    return np.array(draw(st.lists(loads, min_size=1, max_size=3)), np.int64), spread


def fullest(load_LE: np.ndarray, placement: Placement) -> np.ndarray:
    return device_loads(load_LE, placement).max(-1)


@settings(deadline=None, max_examples=150)
@given(problems(), st.integers(0, 2**31))
def test_what_holds_of_every_placement(problem, seed):
    load_LE, spread = problem
    found = place(load_LE, spread)
    plain = canonical(*load_LE.shape, spread)
    E, P = load_LE.shape[1], spread.devices
    assert found.spread == spread
    np.testing.assert_array_equal(np.sort(found.slots_LE, 1), plain.slots_LE)
    assert np.all(fullest(load_LE, found) <= fullest(load_LE, plain))
    np.testing.assert_allclose(device_loads(load_LE, found).sum(-1), load_LE.sum(-1))
    for slots_E, copies_Pc in zip(*found, strict=True):
        owner = slots_E // (E // P)
        assert np.bincount(owner, minlength=P).tolist() == [E // P] * P
        for device, experts in enumerate(copies_Pc):
            held = experts[experts < E].tolist()
            assert len(set(held)) == len(held) and all(owner[x] != device for x in held)
        assert np.bincount(copies_Pc[copies_Pc < E], minlength=1).max() < MAX_PLACES
    if spread.copies:
        fewer = place(load_LE, spread._replace(copies=spread.copies - 1))
        assert np.all(fullest(load_LE, found) <= fullest(load_LE, fewer))
    again = place(load_LE.copy(), spread)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    # From any placement it only gets better, and one that is not beaten stays.
    rng = np.random.default_rng(seed)
    other = found._replace(slots_LE=rng.permuted(found.slots_LE, axis=1))
    if not spread.copies:
        assert np.all(fullest(load_LE, place(load_LE, spread, other)) <= fullest(load_LE, other))
    stays = place(load_LE, spread, found)
    assert all(np.array_equal(a, b) for a, b in zip(found, stays, strict=True))


@settings(deadline=None, max_examples=60)
@given(problems())
def test_the_tables_lead_tokens_where_the_loads_say(problem):
    load_LE, spread = problem
    placement = place(load_LE, spread)
    places_LEK, sources_LK = place_tables(placement)
    E, (P, c) = load_LE.shape[1], spread
    per_device = E // P + c
    assert places_LEK.shape[2] == spread.columns and places_LEK.max() <= spread.num_places(E)
    for layer, load_E in enumerate(load_LE):
        got_P = np.zeros(P)
        for expert, row_K in enumerate(places_LEK[layer]):
            num_places, places = (row_K[0], row_K[1:]) if c else (1, row_K)
            assert 1 <= num_places <= len(places)
            for at in places[:num_places]:
                device, column = divmod(at, per_device)
                got_P[device] += load_E[expert] / num_places
                slot = device * (E // P) + column
                if column >= E // P:
                    slot = sources_LK[layer, device * c + column - E // P]
                assert slot == placement.slots_LE[layer, expert]
            ids, turns = np.full((7, 1), expert, np.int32), np.arange(7, dtype=np.int32)
            want = places[turns % num_places][:, None]
            np.testing.assert_array_equal(look_up(ids, turns, places_LEK[layer]), want)
        np.testing.assert_allclose(got_P, device_loads(load_LE, placement)[layer])


def zipf(num_layers: int, num_experts: int, exponent: float) -> np.ndarray:
    """Counts of a skewed router: another order of the experts in each layer."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, num_experts + 1) ** exponent
    shares = np.stack([rng.permutation(share / share.sum()) for _ in range(num_layers)])
    return rng.poisson(shares * 16 * 100_000)


@pytest.mark.parametrize(
    "exponent,copies,limit", [(0.3, 0, 1.03), (0.7, 1, 1.001), (1.0, 1, 1.02), (1.0, 2, 1.005)]
)
def test_skewed_loads_come_out_even(exponent, copies, limit):
    load_LE, spread = zipf(4, 896, exponent), Spread(64, copies)
    before = imbalance(device_loads(load_LE, canonical(4, 896, spread)))
    after = imbalance(device_loads(load_LE, place(load_LE, spread)))
    assert np.all(before > 1.2) and np.all(after <= limit), (before, after)


def test_without_copies_the_busiest_expert_is_the_limit():
    """No permutation can split an expert: the fullest device has it and the idlest others."""
    load_LE, spread = zipf(2, 64, 1.0), Spread(8)
    found = device_loads(load_LE, place(load_LE, spread))
    least = load_LE.max(-1) + np.sort(load_LE)[:, :7].sum(-1)
    np.testing.assert_array_equal(found.max(-1), least)
