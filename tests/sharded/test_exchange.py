"""The expert exchange alone.

Whatever the mesh, the routing and the buffer, it is the plain sum over experts.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.partitioning import num_batch_shards
from moejax.partitioning.expert_exchange import exchange_experts, resolve_exchange
from tests.sharded.meshes import (
    DATA2_EXPERT4,
    EXPERT8,
    FSDP2_EXPERT4,
    ONE,
    assert_leaves_agree,
    mesh_of,
    named,
    relative_error,
)

B, T, L, E = 8, 64, 8, 8
MESHES = {named(sizes): sizes for sizes in (ONE, EXPERT8, FSDP2_EXPERT4, DATA2_EXPERT4)}
SHARDED = [name for name in MESHES if name != "one"]
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def experts(weights, rows_RL, group_sizes_e):
    """A non-linear map with a bias: empty rows give something too, so a slot that leaks is seen.

    Sums over rows are float32 or wider, as in the grouped matmul that training uses.
    """
    ends_e = jnp.cumsum(group_sizes_e)
    row_R = jnp.arange(rows_RL.shape[0])
    expert_R = jnp.minimum(jnp.sum(row_R[:, None] >= ends_e, 1), ends_e.size - 1)
    full = jnp.promote_types(rows_RL.dtype, jnp.float32)
    up_RLL, bias_RL = (weights[name].astype(full)[expert_R] for name in ("up", "bias"))
    out_RL = jnp.tanh(jnp.einsum("rl,rlk->rk", rows_RL.astype(full), up_RLL) + bias_RL)
    return out_RL.astype(rows_RL.dtype)


def plain(x_BTL, ids_BTA, weights_BTA, weights):
    """Every expert on every token, then the weighted sum of the chosen ones."""
    all_BTEL = jnp.tanh(jnp.einsum("btl,elk->btek", x_BTL, weights["up"]) + weights["bias"])
    chosen_BTAE = jax.nn.one_hot(ids_BTA, E, dtype=x_BTL.dtype)  # zeros for "no expert"
    return jnp.einsum("btekl,btae,bta->btl", all_BTEL[..., None, :], chosen_BTAE, weights_BTA)


@functools.cache
def values(A: int, dtype: str = "float32"):
    """Inputs [x, combine weights, expert weights] and the cotangent of the output."""
    rng = np.random.default_rng(A)
    draw = lambda *shape, scale=1.0: (scale * rng.standard_normal(shape)).astype(dtype)  # noqa: E731
    weights = {"up": draw(E, L, L, scale=0.4), "bias": draw(E, L)}
    combine = draw(B, T, A).astype("float64" if dtype == "float64" else "float32")
    return (draw(B, T, L), combine, weights), draw(B, T, L)


def routings(A: int) -> dict[str, np.ndarray]:
    """Expert ids [B, T, A] of every kind of routing; id E means no expert."""
    rng = np.random.default_rng(10 + A)
    token = np.arange(B * T).reshape(B, T, 1)
    distinct = np.argsort(rng.random((B, T, E)), -1)[..., :A]
    hot = np.full((B, T, A), 5)
    out = {
        "balanced": (token * A + np.arange(A)) % E,
        "random": distinct,
        "one expert": hot,
        "last expert": np.full((B, T, A), E - 1),
        "no expert": np.full((B, T, A), E),
        "half without": np.where(rng.random((B, T, A)) < 0.5, E, distinct),
        "three empty": distinct % (E - 3),
        # A device that sends all it has to one expert while the others have little to do.
        "one row hot": np.where(token < T, hot, np.where(rng.random((B, T, A)) < 0.9, E, distinct)),
    }
    return {name: ids.astype(np.int32) for name, ids in out.items()}


@functools.cache
def program(name: str, A: int, buffer_factor: float, dtype: str = "float32"):
    """Compiled (values, ids, cotangent) -> (output, gradients, stats) of one mesh."""
    mesh = mesh_of(MESHES[name])

    def run(inputs, ids, cotangent):
        def forward(x, combine, weights):
            return exchange_experts(
                x, ids, combine, weights, experts, num_experts=E, buffer_factor=buffer_factor
            )

        out, pull, stats = jax.vjp(forward, *inputs, has_aux=True)
        return out, pull(cotangent), stats

    inputs, cotangent = values(A, dtype)
    with jax.set_mesh(mesh):
        jitted = jax.jit(run, compiler_options=FAST_COMPILE)
        compiled = jitted.lower(inputs, routings(A)["random"], cotangent).compile()

    def call(inputs, ids, cotangent):
        return jax.tree.map(np.asarray, compiled(inputs, ids, cotangent))

    return call


@functools.cache
def plain_program(A: int, dtype: str = "float32"):
    def run(inputs, ids, cotangent):
        x, combine, weights = inputs
        out, pull = jax.vjp(lambda *v: plain(v[0], ids, v[1], v[2]), x, combine, weights)
        return out, pull(cotangent)

    return jax.jit(run)


def expected_rounds(name: str, ids_BTA: np.ndarray, buffer_factor: float) -> int:
    """Buckets that the fullest pair of devices needs, counted without the exchange's own code."""
    sizes = dict(mesh_of(MESHES[name]).shape)
    ranks, shards = sizes["expert"], num_batch_shards(sizes)
    if ranks == 1:
        return 1
    by_shard = ids_BTA.reshape(shards, -1)
    rows = by_shard.shape[1]
    bucket = min(8 * math.ceil(math.ceil(buffer_factor * rows / ranks) / 8), rows)
    target = np.where(by_shard < E, by_shard // (E // ranks), ranks)
    fullest = max(np.bincount(t, minlength=ranks + 1)[:ranks].max() for t in target)
    return max(1, math.ceil(fullest / bucket))


def check(name: str, A: int, buffer_factor: float, ids, dtype="float32", tolerance=1e-5) -> int:
    """Output and every gradient equal the plain sum.

    Returns:
      The rounds, which must be as counted.
    """
    inputs, cotangent = values(A, dtype)
    *got, stats = program(name, A, buffer_factor, dtype)(inputs, ids, cotangent)
    want = plain_program(A, dtype)(inputs, ids, cotangent)
    assert_leaves_agree(got, want, tolerance)
    rounds = int(stats.rounds)
    assert rounds == expected_rounds(name, ids, buffer_factor)
    return rounds


CASES = [(2, 0.25), (2, 0.5), (2, 1.5), (1, 0.5), (E, 0.25)]


@pytest.mark.parametrize("A,buffer_factor", CASES, ids=str)
@pytest.mark.parametrize("name", MESHES)
def test_equals_the_plain_sum_for_every_routing(name, A, buffer_factor):
    if name == "one" and buffer_factor != CASES[0][1] and A == 2:
        buffer_factor = CASES[0][1]  # a single device has no buffer: one program for all
    rounds = {kind: check(name, A, buffer_factor, ids) for kind, ids in routings(A).items()}
    assert rounds["no expert"] == 1
    if name == "one":
        assert set(rounds.values()) == {1}
    else:
        assert rounds["one expert"] > 1 and rounds["last expert"] > 1
    if A == 2 and buffer_factor == 1.5:
        assert rounds["balanced"] == 1


@pytest.mark.parametrize("name", SHARDED)
def test_gradient_of_further_rounds_in_float64(name):
    """No rounding to hide behind: four and more rounds give the plain sum's gradient to 1e-13."""
    with jax.enable_x64(True):
        ids = routings(2)
        assert check(name, 2, 0.25, ids["one expert"], "float64", 1e-13) >= 4
        assert check(name, 2, 0.25, ids["one row hot"], "float64", 1e-13) >= 4
        check(name, 2, 0.25, ids["half without"], "float64", 1e-13)


@st.composite
def any_routing(draw):
    """Ids from a few experts (or none) for whole rows, and a random rest."""
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    favourites = draw(st.lists(st.integers(0, E), min_size=B, max_size=B))
    share = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    ids = rng.integers(0, E + 1, (B, T, 2))
    use_favourite = rng.random((B, T, 2)) < share
    return np.where(use_favourite, np.asarray(favourites)[:, None, None], ids).astype(np.int32)


@pytest.mark.parametrize("name", SHARDED)
def test_no_token_is_lost_whatever_the_routing(name):
    """Also where both choices of a token are one expert."""

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(any_routing())
    def run(ids):
        check(name, 2, 0.25, ids)

    run()


@pytest.mark.parametrize("name", MESHES)
def test_order_of_tokens_does_not_matter(name):
    """Permuting tokens over the whole batch, and so over devices, permutes output and gradients."""
    (x, combine, weights), cotangent = values(2)
    ids = routings(2)["one row hot"]
    order = np.random.default_rng(4).permutation(B * T)

    def shuffled(a):
        return a.reshape(B * T, -1)[order].reshape(a.shape)

    run = program(name, 2, 0.25)
    out, (dx, dcombine, dweights), _ = run((x, combine, weights), ids, cotangent)
    mixed = (shuffled(x), shuffled(combine), weights)
    got, (got_dx, got_dcombine, got_dweights), _ = run(mixed, shuffled(ids), shuffled(cotangent))
    want = [shuffled(a) for a in (out, dx, dcombine)]
    assert_leaves_agree([got, got_dx, got_dcombine], want, 1e-6)
    assert_leaves_agree(got_dweights, dweights, 1e-5)


@pytest.mark.parametrize("name", MESHES)
def test_bfloat16(name):
    """Rows and weights in bfloat16 give the float32 sum up to rounding and keep their dtypes."""
    inputs, cotangent = values(2, "bfloat16")
    assert inputs[0].dtype == jnp.bfloat16 and inputs[1].dtype == np.float32
    full = jax.tree.map(lambda a: a.astype(np.float32), (inputs, cotangent))
    for kind in ("random", "one expert"):
        ids = routings(2)[kind]
        *got, _ = program(name, 2, 0.25, "bfloat16")(inputs, ids, cotangent)
        assert jax.tree.map(lambda a: a.dtype, got) == jax.tree.map(
            lambda a: a.dtype, [inputs[0], inputs]
        )
        want = plain_program(2)(full[0], ids, full[1])
        # Two or three roundings of 2^-9 each way, and one more for every device that adds up.
        assert_leaves_agree(got, want, 2**-6)


def test_exchange_by_name():
    assert resolve_exchange("auto", 1) == "local" and resolve_exchange("auto", 4) == "padded"
    assert resolve_exchange("padded", 1) == "padded"
    (x, combine, weights), _ = values(2)
    x, combine, ids = map(jnp.asarray, (x, combine, routings(2)["random"]))
    with pytest.raises(ValueError, match="needs a mesh with an expert axis"):
        exchange_experts(x, ids, combine, weights, experts, num_experts=E, exchange="padded")
    out, _ = exchange_experts(x, ids, combine, weights, experts, num_experts=E)
    assert relative_error(out, plain(x, ids, combine, weights)) <= 1e-6
