"""A layer whose experts lie in other slots, some of them also as copies, is the layer it was.

Output and every gradient (input, router, latent maps, experts, shared experts), put back in the
order of the experts' numbers, against experts in order on one device.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.layers.moe.placement import Placement, Spread, place_tables
from moejax.partitioning.expert_exchange import Copies, exchange_experts
from moejax.partitioning.expert_exchange.relocate import relocate
from tests.sharded.meshes import (
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    ONE,
    assert_leaves_agree,
    mesh_of,
    named,
    relative_error,
)

B, T, D, E = 16, 7, 16, 16
FAST_COMPILE = {"xla_backend_optimization_level": 0}


class Case(NamedTuple):
    sizes: dict
    exchange: str
    copies: int = 0
    slices: int = 1

    def __str__(self) -> str:
        return f"{named(self.sizes)}-{self.exchange}-{self.copies}-{self.slices}"


CASES = [
    Case(ONE, "auto"),
    Case(FSDP2_EXPERT4, "padded"),
    Case(EXPERT8, "ragged"),
    Case(DATA2_FSDP2_EXPERT2, "ragged", copies=1, slices=2),
]
MORE = [
    Case(sizes, exchange, copies, slices)
    for sizes in (DATA2_FSDP2_EXPERT2, FSDP2_EXPERT4, EXPERT8)
    for exchange in ("padded", "ragged")
    for copies in (0, 1, 3)
    for slices in (1, 4)
]


def layer_of(case: Case | None) -> LatentMoe:
    """The layer; a large init, so that the routing is lopsided. None: in order, on one device."""
    exchange, slices = ("local", 1) if case is None else (case.exchange, case.slices)
    cfg = MoeConfig(
        num_experts=E, top_k=3, expert_dim=8, latent_dim=8, num_shared=1, capacity_factor=2.0,
        exchange=exchange, exchange_slices=slices, buffer_factor=0.5, receive_factor=0.75,
    )  # fmt: skip
    spread = None if case is None else Spread(case.sizes.get("expert", 1), case.copies)
    return LatentMoe(D, cfg, FfnConfig(), 1e-5, 0.5, nnx.Rngs(params=3), spread=spread)


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    x_BTD = rng.standard_normal((B, T, D)) + rng.standard_normal((B, 1, D))
    segment_ids_BT = np.ones((B, T), np.int32)
    segment_ids_BT[::2, -2:] = 0
    return x_BTD.astype(np.float32), segment_ids_BT, rng.standard_normal((B, T, D), np.float32)


def gradients(case: Case | None, params, state, x_BTD, segment_ids_BT, cotangent_BTD):
    """Output, load of the experts, gradients of input and parameters."""

    def run(params, x_BTD):
        layer = layer_of(case)
        nnx.update(layer, params)
        nnx.update(layer, state)
        out_BTD, aux = layer(x_BTD, segment_ids_BT)
        return out_BTD, aux["load"]

    out_BTD, pull, load_E = jax.vjp(run, params, x_BTD, has_aux=True)
    grads, dx_BTD = pull(cotangent_BTD)
    return out_BTD, load_E, dx_BTD, grads


def compiled(case: Case | None, *arguments):
    program = jax.jit(functools.partial(gradients, case), compiler_options=FAST_COMPILE)
    if case is None:
        return program(*arguments)
    with jax.set_mesh(mesh_of(case.sizes)):
        return program(*arguments)


@functools.cache
def in_order():
    """What the plain layer gives, and its parameters."""
    params = nnx.to_pure_dict(nnx.state(layer_of(None), nnx.Param))
    params = jax.tree.map(np.asarray, params)
    return params, jax.tree.map(np.asarray, compiled(None, params, {}, *inputs()))


def shuffled(spread: Spread) -> Placement:
    """Slots and copies at random; one place for a copy stays empty."""
    rng = np.random.default_rng(5)
    slots_E = rng.permutation(E).astype(np.int32)
    copies_Pc = np.full(spread, E, np.int32)
    for device, places in enumerate(copies_Pc):
        others = np.flatnonzero(slots_E // (E // spread.devices) != device)
        places[:] = rng.choice(others[others < 6], len(places), replace=False)
    copies_Pc[-1:, -1:] = E
    return Placement(slots_E[None], copies_Pc[None])


def with_experts(params: dict, order_E: np.ndarray) -> dict:
    """Parameters whose expert i is the given ones' `order[i]`."""
    experts = {name: leaf[order_E] for name, leaf in params["experts"].items()}
    return {**params, "experts": experts}


def check(case: Case) -> None:
    params, (out, load_E, dx, grads) = in_order()
    spread = Spread(case.sizes.get("expert", 1), case.copies)
    placement = shuffled(spread)
    places_LET, sources_LK = place_tables(placement)
    state = {"places": places_LET[0]} | ({"sources": sources_LK[0]} if case.copies else {})
    slots_E = placement.slots_LE[0]
    got = compiled(case, with_experts(params, np.argsort(slots_E)), state, *inputs())
    got_out, got_load, got_dx, got_grads = jax.tree.map(np.asarray, got)
    np.testing.assert_array_equal(got_load, load_E)
    assert relative_error(got_out, out) <= 1e-5 and relative_error(got_dx, dx) <= 1e-5
    assert_leaves_agree(with_experts(got_grads, slots_E), grads, 1e-5)
    if case.copies:
        assert (sources_LK < E).any() and (places_LET[0] != places_LET[0, :, :1]).any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_placed_layer_equals_the_layer_in_order(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_every_placed_layer_equals_the_layer_in_order(case):
    check(case)


def test_the_routing_is_lopsided():
    load_E = in_order()[1][1]
    assert load_E.max() > 2 * load_E.mean()


def test_copies_need_a_mesh():
    ids = jnp.zeros((1, 1, 1), jnp.int32)
    with pytest.raises(ValueError, match="mesh"):
        exchange_experts(
            jnp.zeros((1, 1, 2)), ids, jnp.ones((1, 1, 1)), {}, lambda *a: a[1],
            num_experts=4, copies=Copies(jnp.zeros(2, jnp.int32), 3),
        )  # fmt: skip


@pytest.mark.parametrize(
    "spec", [P(None, None, "expert", "fsdp"), P(None, None, ("expert", "fsdp"))]
)
def test_experts_move_where_they_are_stored(spec):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, E, 4, 2)).astype(np.float32)
    source = np.stack([rng.permutation(E) for _ in range(6)]).astype(np.int32)
    where = NamedSharding(mesh_of(FSDP2_EXPERT4), P(*spec))
    moved = jax.jit(lambda x, s: relocate(x, s, 2, where), donate_argnums=0)(
        jax.device_put(x, where), source
    )
    want = np.take_along_axis(x.reshape(6, E, 4, 2), source[:, :, None, None], 1)
    np.testing.assert_array_equal(moved, want.reshape(x.shape))
    assert moved.sharding.is_equivalent_to(where, x.ndim)
