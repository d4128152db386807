"""One MoE layer is the same through any exchange, mesh, number of slices, remat and microbatches.

Output, the sum of every gradient over the microbatches (router, latent maps, experts, shared
experts, input) and its global norm, against `local` on one device.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.memory.policy import remat
from tests.sharded.meshes import ONE, assert_leaves_agree, mesh_of, relative_error

B, T, D = 64, 7, 16
FAST_COMPILE = {"xla_backend_optimization_level": 0}


class Case(NamedTuple):
    exchange: str
    level: str  # once for each expert, device or host; two devices a host
    expert: int  # devices that share the experts; eight devices in all
    slices: int
    remat: str
    data: int
    experts: int  # on each of eight devices
    accumulation: int

    def __str__(self) -> str:
        return "-".join(f"{value}" for value in self)


LEVELS = Case(
    exchange=("ragged", "padded", "local"), level=("expert", "device", "host"), expert=(1, 2, 4, 8),
    slices=(1, 2, 4), remat=("none", "full", "exchange"), data=(1, 2), experts=(1, 7),
    accumulation=(1, 2, 4, 8),
)  # fmt: skip


def is_possible(case: Case) -> bool:
    """`local` knows no expert axis, no level and no slices; two hosts of two need four devices.

    Two replicas of eight experts need 16.
    """
    if case.exchange == "local":
        return case.expert == 1 and case.slices == 1 and case.level == "expert"
    if case.level == "host" and case.expert < 4:
        return False
    return case.data * case.expert <= 8


PRODUCT = [case for values in itertools.product(*LEVELS) if is_possible(case := Case(*values))]
# What the default tier varies; the slow one has the rest.
QUICK = LEVELS._replace(slices=(1, 4), remat=("none", "full"), accumulation=(1, 8))


def pairwise(cases: list[Case]) -> list[Case]:
    """A subset in which any two settings that can meet do meet: greedily, the same every time."""

    def pairs(case: Case) -> set:
        return set(itertools.combinations(enumerate(case), 2))

    open_pairs, chosen = set().union(*map(pairs, cases)), []
    while open_pairs:
        best = max(cases, key=lambda case: len(pairs(case) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def all_within(levels: Case) -> list[Case]:
    return [c for c in PRODUCT if all(v in level for v, level in zip(c, levels, strict=True))]


COVERING = pairwise(all_within(QUICK))


def test_the_covering_set_covers():
    assert len(COVERING) <= 16 and len(PRODUCT) > 2000
    for (i, one), (j, other) in itertools.combinations(enumerate(QUICK), 2):
        for pair in itertools.product(one, other):
            meets = {c for c in all_within(QUICK) if (c[i], c[j]) == pair}
            assert not meets or meets & set(COVERING), pair


def layer_with(case: Case) -> LatentMoe:
    """The layer; a large init, so that the routing is lopsided."""
    cfg = MoeConfig(
        num_experts=8 * case.experts, top_k=3, expert_dim=8, latent_dim=8, num_shared=1,
        exchange=case.exchange, exchange_slices=case.slices, exchange_level=case.level,
        exchange_hosts=max(case.expert // 2, 1) if case.level == "host" else 1,
        buffer_factor=0.5, receive_factor=0.75,
    )  # fmt: skip
    return LatentMoe(D, cfg, FfnConfig(), 1e-5, 0.5, nnx.Rngs(params=3))


@functools.cache
def start(experts: int) -> dict:
    """Parameters of the layer, the same for every case."""
    layer = layer_with(Case("local", "expert", 1, 1, "none", 1, experts, 1))
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(layer, nnx.Param)))


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    x_BTD = rng.standard_normal((B, T, D)) + rng.standard_normal((B, 1, D))
    segment_ids_BT = np.ones((B, T), np.int32)
    segment_ids_BT[::2, -2:] = 0
    return x_BTD.astype(np.float32), segment_ids_BT, rng.standard_normal((B, T, D), np.float32)


def microbatches(case: Case):
    """Rows [microbatch, row, ...], where every microbatch lies on all devices."""
    return jax.tree.map(lambda a: a.reshape(case.accumulation, -1, *a.shape[1:]), inputs())


def forward(case: Case):
    """(params, x, segment ids) -> output and rounds, under the case's remat."""

    def run(params, x_BTD, segment_ids_BT):
        layer = layer_with(case)
        nnx.update(layer, params)
        out_BTD, aux = layer(x_BTD, segment_ids_BT)
        return out_BTD, aux["rounds"]

    return remat(run, case.remat)


def gradients(case: Case):
    """(params, microbatches) -> outputs, input gradients, summed gradients, their norm, rounds."""
    run = forward(case)

    def one(total, batch):
        params, x_BTD, segment_ids_BT, cotangent_BTD = batch
        of = functools.partial(run, segment_ids_BT=segment_ids_BT)
        out, pull, rounds = jax.vjp(of, params, x_BTD, has_aux=True)
        new, dx_BTD = pull(cotangent_BTD)
        return jax.tree.map(jnp.add, total, new), (out, dx_BTD, rounds)

    def all_of_them(params, batches):
        body = lambda total, batch: one(total, (params, *batch))  # noqa: E731
        total, (out, dx, rounds) = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batches)
        flat = (a.reshape(B, T, D) for a in (out, dx))
        return *flat, total, optax.tree.norm(total), rounds

    return all_of_them


@functools.cache
def result(case: Case):
    """What one case gives, as NumPy arrays."""
    sizes = {"data": case.data, "fsdp": 8 // (case.data * case.expert), "expert": case.expert}
    with jax.set_mesh(mesh_of(sizes)):
        jitted = jax.jit(gradients(case), compiler_options=FAST_COMPILE)
        return jax.tree.map(np.asarray, jitted(start(case.experts), microbatches(case)))


@functools.cache
def wanted(experts: int):
    """`local` on one device in one batch."""
    case = Case("local", "expert", 1, 1, "none", 1, experts, 1)
    with jax.set_mesh(mesh_of(ONE)):
        out = jax.jit(gradients(case), compiler_options=FAST_COMPILE)(
            start(experts), microbatches(case)
        )
    return jax.tree.map(np.asarray, out)


def check(case: Case) -> None:
    out, dx, total, norm, rounds = result(case)
    want_out, want_dx, want_total, want_norm, _ = wanted(case.experts)
    assert_leaves_agree([out, dx], [want_out, want_dx], 1e-5)
    assert_leaves_agree(total, want_total, 1e-5)
    assert relative_error(norm, want_norm) <= 1e-5
    for path, leaf in jax.tree_util.tree_leaves_with_path(total):
        assert np.any(leaf != 0), jax.tree_util.keystr(path)
    # Where the mean of what is sent is above the buffer, further rounds are part of the comparison.
    if case.expert > 1 and case.expert * case.slices < 32 and case.accumulation == 1:
        assert rounds.max() > 1


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_equals_local_on_one_device(case):
    check(case)


def has_its_turn(case: Case) -> bool:
    """One number of microbatches for every other combination, all four equally often."""
    places = [level.index(value) for level, value in zip(LEVELS, case, strict=True)]
    return places[-1] == sum(places[:-1]) % 4


SLOW = list(filter(has_its_turn, PRODUCT))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_full_product(case):
    check(case)
