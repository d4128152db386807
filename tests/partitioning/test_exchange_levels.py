"""A token sent once a device or once a host gives what one row for each of its experts gives.

Several experts a device, more choices than hosts and fewer than devices, a prime number of tokens,
NaN wherever a row is not meant to be read; rows and bytes are those that NumPy counts.
"""

import functools
import itertools
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_policies

from moejax.config import ConfigError, FfnConfig, MeshConfig, MoeConfig, RunConfig
from moejax.config.mesh import DcnConfig
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.partitioning.expert_exchange import (
    DISPATCHED,
    RETURNED,
    collective,
    exchange_experts,
    ragged,
)
from moejax.partitioning.expert_exchange.levels import distinct_groups, even_copies
from tests.sharded.meshes import (
    DATA2_EXPERT4,
    DATA2_FSDP2_EXPERT2,
    EXPERT8,
    FSDP2_EXPERT4,
    ONE,
    assert_leaves_agree,
    mesh_of,
    named,
)
from tests.sharded.test_exchange import FAST_COMPILE, experts

B, T, A, E, WIDTH = 8, 7, 5, 24, 6
KEEP = checkpoint_policies.save_only_these_names(DISPATCHED, RETURNED)
TOKEN = np.arange(B * T).reshape(B, T, 1)


class Case(NamedTuple):
    mesh: dict
    hosts: int
    level: str
    exchange: str
    factor: float
    slices: int

    def __str__(self) -> str:
        mesh = f"{named(self.mesh)}on{self.hosts}"
        return f"{mesh}-{self.level}-{self.exchange}-x{self.factor}-in{self.slices}"


CASES = [
    Case(EXPERT8, 2, "device", "ragged", 1.25, 2),
    Case(FSDP2_EXPERT4, 2, "device", "padded", 0.5, 1),
    Case(EXPERT8, 2, "host", "ragged", 0.5, 1),
    Case(EXPERT8, 4, "host", "padded", 1.25, 2),
]
MESHES = [
    (EXPERT8, 2), (EXPERT8, 4), (EXPERT8, 8), (FSDP2_EXPERT4, 2), (DATA2_EXPERT4, 2),
    (DATA2_FSDP2_EXPERT2, 2),
]  # fmt: skip
PRODUCT = [
    Case(*mesh, level, exchange, factor, slices)
    for mesh, level, exchange, factor, slices in itertools.product(
        MESHES, ("device", "host"), ("ragged", "padded"), (0.25, 1.25, 9.0), (1, 2)
    )
]
by_name = {str(case): case for case in CASES + PRODUCT}


def routings() -> dict[str, np.ndarray]:
    """Expert ids [B, T, A]; id E means no expert."""
    rng = np.random.default_rng(3)
    distinct = np.argsort(rng.random((B, T, E)), -1)[..., :A]
    without = rng.random((B, T, 1)) < 0.4
    out = {
        "balanced": (TOKEN * A + np.arange(A)) % E,
        "random": distinct,
        "one expert": np.full((B, T, A), 13),
        "one device": 12 + distinct % 3,
        "one host": distinct % 12,
        "three empty": distinct % (E - 3),
        "padding": np.where(without, E, distinct),
        "some none": np.where(rng.random((B, T, A)) < 0.5, E, distinct),
        "no expert": np.full((B, T, A), E),
    }
    return {name: ids.astype(np.int32) for name, ids in out.items()}


@functools.cache
def values(dtype: str):
    """Inputs [x, combine weights, expert weights] and the cotangent of the output."""
    rng = np.random.default_rng(WIDTH)
    draw = lambda *shape, scale=1.0: (scale * rng.standard_normal(shape)).astype(dtype)  # noqa: E731
    weights = {"up": draw(E, WIDTH, WIDTH, scale=WIDTH**-0.5), "bias": draw(E, WIDTH)}
    return (draw(B, T, WIDTH), draw(B, T, A), weights), draw(B, T, WIDTH)


@functools.lru_cache(maxsize=16)
def program(case: str, dtype: str = "float32"):
    """Compiled (values, ids, cotangent) -> (output, gradients, stats), its buffers full of NaN."""
    _, hosts, level, exchange, factor, slices = by_name[case]
    options = {"exchange": exchange, "slices": slices, "level": level, "hosts": hosts}
    options |= {"buffer_factor": factor, "receive_factor": factor}

    def run(inputs, ids, cotangent):
        def forward(x, combine, weights):
            return exchange_experts(x, ids, combine, weights, experts, num_experts=E, **options)

        out, pull, stats = jax.vjp(forward, *inputs, has_aux=True)
        return out, pull(cotangent), stats

    def poisoned(num_rows, like):
        return jnp.full((num_rows, like.shape[1]), jnp.nan, like.dtype)

    inputs, cotangent = values(dtype)
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh_of(by_name[case].mesh)):
        for module in (collective, ragged):
            patch.setattr(module, "blank_rows", poisoned)
        jitted = jax.jit(run, compiler_options=FAST_COMPILE)
        return jitted.lower(inputs, routings()["random"], cotangent).compile()


@functools.cache
def plain_program():
    """Every expert on every token, then the weighted sum of the chosen ones."""

    def plain(x_BTL, weights_BTA, weights, ids_BTA):
        all_BTEL = jnp.tanh(jnp.einsum("btl,elk->btek", x_BTL, weights["up"]) + weights["bias"])
        chosen_BTAE = jax.nn.one_hot(ids_BTA, E, dtype=x_BTL.dtype)
        return jnp.einsum("btekl,btae,bta->btl", all_BTEL[..., None, :], chosen_BTAE, weights_BTA)

    def run(inputs, ids, cotangent):
        out, pull = jax.vjp(lambda *v: plain(*v, ids), *inputs)
        return out, pull(cotangent)

    return jax.jit(run, compiler_options=FAST_COMPILE)


def check(case: str, kind: str, dtype: str = "float32", tolerance: float = 1e-5):
    """Output and gradients equal the plain sum, where tokens without expert hold NaN."""
    (x, combine, weights), cotangent = values(dtype)
    ids = routings()[kind]
    poisoned = np.where((ids == E).all(-1, keepdims=True), np.nan, x).astype(dtype)
    *got, stats = program(case, dtype)((poisoned, combine, weights), ids, cotangent)
    want = plain_program()((x, combine, weights), ids, cotangent)
    assert_leaves_agree(jax.tree.map(np.asarray, got), want, tolerance)
    return stats


def crossings(case: str, ids: np.ndarray) -> tuple[float, float]:
    """Rows that leave a device and rows that leave its host, per device, by counting sets."""
    mesh, hosts, level, *_ = by_name[case]
    ranks = mesh["expert"]
    near = ranks // hosts
    left_device = left_host = 0
    for row, token_ids in enumerate(ids):
        me = row % ranks  # one row a device; the expert axis is the last that is split
        for chosen in token_ids:
            devices = {int(e) // (E // ranks) for e in chosen if e < E}
            far = {d for d in devices if d // near != me // near}
            if level == "device":
                left_device += len(devices - {me})
                left_host += len(far)
                continue
            reached = {d // near for d in far}
            left_host += len(reached)
            # Those that cross, then those that are passed on from the device they came to.
            left_device += len(reached) + len({d for d in devices if d % near != me % near})
    return left_device / B, left_host / B


@pytest.mark.parametrize("case", [str(case) for case in CASES])
def test_equals_the_plain_sum(case):
    rounds = {}
    for kind, ids in routings().items():
        stats = check(case, kind)
        rounds[kind] = float(stats.rounds)
        if by_name[case].exchange == "ragged":
            assert (stats.sent_rows, stats.network_rows) == crossings(case, ids), kind
    assert rounds["one expert"] > 1 and rounds["no expert"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [str(case) for case in PRODUCT])
def test_full_product(case):
    for kind, ids in routings().items():
        stats = check(case, kind)
        if by_name[case].exchange == "ragged":
            assert (stats.sent_rows, stats.network_rows) == crossings(case, ids), kind
        if by_name[case].factor == 9.0:
            assert stats.rounds == 1


@pytest.mark.slow
@pytest.mark.parametrize("case", [str(case) for case in CASES])
def test_in_float64(case):
    """No rounding to hide behind."""
    with jax.enable_x64(True):
        for kind in ("random", "one expert", "one host", "padding"):
            check(case, kind, "float64", 1e-12)


@pytest.mark.parametrize("groups,size", [(8, 3), (2, 12), (24, 1), (1, 24)])
def test_groups_are_named_once(groups, size):
    for ids in routings().values():
        got = np.asarray(distinct_groups(jnp.asarray(ids.reshape(-1, A)), groups, size))
        assert got.shape == (B * T, min(A, groups))
        for row, chosen in zip(got, ids.reshape(-1, A), strict=True):
            named_groups = [g for g in row if g < groups]
            assert len(named_groups) == len(set(named_groups))
            assert set(named_groups) == {e // size for e in chosen if e < E}


def test_average_number_of_copies():
    """Against choosing at random, and what 16 of 896 experts come to."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((20000, E)), -1)[:, :A]
    for groups in (2, 4, 8):
        hit = [len(set(row)) for row in chosen // (E // groups)]
        assert abs(np.mean(hit) - even_copies(E, groups, A)) < 5 * np.std(hit) / math.sqrt(len(hit))
    # 14.25 and 7.06 if an expert could be chosen twice
    assert round(even_copies(896, 64, 16), 2) == 14.36
    assert round(even_copies(896, 8, 16), 2) == 7.07
    assert even_copies(896, 1, 16) == 1 and round(even_copies(896, 896, 16), 9) == 16


@pytest.mark.parametrize(
    "level,hosts,wrong",
    [
        ("rack", 2, "exchange level 'rack' is unknown"),
        ("host", 1, "needs the 8 devices along the expert axis on several hosts"),
        ("device", 3, "3 hosts do not share 8 devices"),
    ],
)
def test_a_level_that_the_mesh_cannot_serve(level, hosts, wrong):
    (x, combine, weights), _ = values("float32")
    ids = routings()["random"]
    with jax.set_mesh(mesh_of(EXPERT8)), pytest.raises(ValueError, match=wrong):
        exchange_experts(x, ids, combine, weights, experts, num_experts=E, level=level, hosts=hosts)


def layer_gradients(mesh: dict, exchange: str, **fields):
    """Output and gradients (router, latent maps, experts, input) of one LatentMoE layer."""
    cfg = MoeConfig(
        num_experts=E, top_k=A, expert_dim=8, latent_dim=WIDTH, num_shared=1, exchange=exchange,
        buffer_factor=0.5, receive_factor=0.75, **fields,
    )  # fmt: skip
    layer = LatentMoe(16, cfg, FfnConfig(), 1e-5, 0.5, nnx.Rngs(params=3))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    rng = np.random.default_rng(1)
    x_BTD, cotangent_BTD = (rng.standard_normal((B, T, 16), np.float32) for _ in range(2))
    segment_ids_BT = np.ones((B, T), np.int32)
    segment_ids_BT[::2, -2:] = 0

    @functools.partial(jax.checkpoint, policy=KEEP, prevent_cse=False)
    def run(params, x_BTD):
        out_BTD, aux = nnx.merge(graph, params, rest)(x_BTD, segment_ids_BT)
        return out_BTD, aux

    def both(params, x_BTD):
        out_BTD, pull, aux = jax.vjp(run, params, x_BTD, has_aux=True)
        return out_BTD, pull(cotangent_BTD), {k: aux[k] for k in ("sent_bytes", "rounds")}

    with jax.set_mesh(mesh_of(mesh)):
        return jax.jit(both, compiler_options=FAST_COMPILE)(params, x_BTD)


@pytest.mark.parametrize("level", [pytest.param("device", marks=pytest.mark.slow), "host"])
def test_a_layer_and_its_router_learn_the_same(level):
    fields = {"exchange_level": level, "exchange_hosts": 2}
    *got, aux = layer_gradients(EXPERT8, "ragged", **fields)
    *want, none = layer_gradients(ONE, "local")
    assert_leaves_agree(jax.tree.map(np.asarray, got), want, 1e-5)
    assert np.any(np.asarray(got[1][0]["router"]["weight"][...]) != 0)
    assert aux["rounds"] > 1 and aux["sent_bytes"] > 0 == none["sent_bytes"]


def exchanges_of_rows(level: str, policy: str) -> int:
    """Collectives that move rows, forward and backward, in two scanned layers' compiled program."""
    (x, combine, weights), _ = values("float32")
    ids = routings()["random"]

    def layer(x_BTL, weights):
        out_BTL, _ = exchange_experts(
            x_BTL, ids, combine, weights, experts, num_experts=E, exchange="ragged",
            receive_factor=9.0, level=level, hosts=2,
        )  # fmt: skip
        return x_BTL + jnp.tanh(out_BTL)  # its derivative needs the output again

    if policy != "none":
        keep = KEEP if policy == "keep" else None
        layer = jax.checkpoint(layer, policy=keep, prevent_cse=False)

    def loss(x_BTL, weights):
        x_BTL, _ = jax.lax.scan(lambda x, _: (layer(x, weights), None), x_BTL, length=2)
        return jnp.sum(x_BTL**2)

    with jax.set_mesh(mesh_of(EXPERT8)):
        jitted = jax.jit(jax.grad(loss, (0, 1)), compiler_options=FAST_COMPILE)
        text = jitted.lower(x, weights).compile().as_text()
    return len(re.findall(rf"= \(?f32\[.*\b{WIDTH}\].* (?:all-to-all|all-gather)\(", text))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["device", "host"])
def test_kept_rows_are_not_sent_again(level):
    """There, back, and both again for the gradients; at level "host" two hops of that."""
    once = exchanges_of_rows(level, "none")
    assert once == {"device": 4, "host": 8}[level]
    assert exchanges_of_rows(level, "keep") == once
    assert exchanges_of_rows(level, "full") > once


def test_hosts_come_from_the_mesh_and_a_config_without_them_is_refused():
    def run(level, hosts, dcn, axis=8):
        mesh = MeshConfig(fsdp=1, expert=axis, dcn=DcnConfig(expert=dcn))
        cfg = RunConfig(mesh=mesh)
        moe = cfg.model.moe.replace(exchange_level=level, exchange_hosts=hosts)
        return cfg.replace(model=cfg.model.replace(moe=moe))

    assert run("host", 0, 4).with_hosts().model.moe.exchange_hosts == 4
    assert run("host", 2, 4).with_hosts().model.moe.exchange_hosts == 2
    assert run("expert", 0, 1).with_hosts().model.moe.exchange_hosts == 1
    for cfg, devices in ((run("host", 0, 4), 8), (run("host", 2, 1), 8), (run("host", 0, 1, 1), 1)):
        cfg.check(devices)
    with pytest.raises(ConfigError, match="needs the 8 devices of mesh.expert on several hosts"):
        run("host", 0, 1).check(8)
    with pytest.raises(ConfigError, match="exchange_hosts=3 does not divide mesh.expert=8"):
        run("device", 3, 1).check(8)
