"""The Swap Core: graphs count what a policy recomputes, and its choice is the best there is."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from moejax.memory.graph import read_graph
from moejax.memory.host_link import host_link
from moejax.memory.policy import Policy, remat
from moejax.memory.swap_core import Budget, Layer, choose, plan_for, tabulate

ROWS, WIDE = 8, 16
NAMES = ("attention_out", "kda_qkv", "moe_latent")
ONE = 2.0 * ROWS * WIDE * WIDE  # FLOPs of a product


def layer(x, weights):
    """Three products in a row, each tagged and then bent, so that each has to be known again."""
    for name, weight in zip(NAMES, weights, strict=True):
        x = jnp.sin(checkpoint_name(x @ weight, name))
    return x


def layers_of(fn=layer, count=3) -> list[Layer]:
    x = jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32)
    weights = [jax.ShapeDtypeStruct((WIDE, WIDE), jnp.float32)] * len(NAMES)

    def gradient(d, x, weights):
        again = jax.checkpoint(lambda x: fn(x, weights), prevent_cse=False)
        return jax.vjp(again, x)[1](d)

    forward = read_graph(jax.make_jaxpr(fn)(x, weights))
    backward = read_graph(jax.make_jaxpr(gradient)(x, x, weights), [0])
    return [Layer("toy", count, forward, backward)]


def test_flops_and_bytes_of_every_set_of_names():
    (only,) = layers_of()
    table = tabulate([only])
    assert table.names == NAMES
    assert only.forward.flops == 3 * ONE and only.backward.backward_flops() == 3 * ONE
    size = 4.0 * ROWS * WIDE
    # the last of a chain of kept names is all that saves what stands before it
    for kept, products in (((), 3), ((0,), 2), ((1,), 2), ((2,), 2), ((0, 1), 1), ((0, 1, 2), 0)):
        number = sum(1 << i for i in kept)
        assert table.flops[number] == 3 * products * ONE, kept
        assert [*table.held[:, number]] == [3 * size * (i in kept) for i in range(3)]


@pytest.mark.parametrize("kept", [(), (1,), (0, 2), (0, 1, 2)])
def test_the_graph_agrees_with_what_jax_does(kept):
    """FLOPs of the gradient that JAX makes under the policy, and the arrays that it saves."""
    policy = Policy(keep=tuple(NAMES[i] for i in kept))
    x = jnp.ones((ROWS, WIDE))
    weights = [jnp.ones((WIDE, WIDE))] * 3

    def pull_of(x):
        return jax.vjp(remat(lambda x: layer(x, weights), policy), x)[1]

    leaves = [a for a in jax.tree.leaves(pull_of(x)) if a.shape == x.shape]
    saved = [a for a in leaves if not jnp.array_equal(a, x)]
    jaxpr = jax.make_jaxpr(lambda x, d: pull_of(x)(d))(x, x)
    dots = str(jaxpr).count("dot_general")
    number = sum(1 << i for i in kept)
    table = tabulate(layers_of(count=1))
    forward, backward = 3, 3
    assert dots * ONE == table.flops[number] + (forward + backward) * ONE
    assert sum(a.nbytes for a in saved) == table.held[:, number].sum()


def test_a_name_that_another_makes_needless_holds_nothing():
    def fn(x, weights):
        first = checkpoint_name(x @ weights[0], NAMES[0])
        return jnp.sin(checkpoint_name(first @ weights[1], NAMES[1])) @ weights[2]

    table = tabulate(layers_of(fn, 1))
    assert table.held[:, 0b11].tolist() == [0, 4.0 * ROWS * WIDE]
    assert table.flops.tolist() == [2 * ONE, ONE, 0, 0]


def test_loops_count_by_their_trips():
    def body(i, carry):
        rows = jax.lax.dynamic_slice_in_dim(carry, 4 * i, 4)
        return jax.lax.dynamic_update_slice_in_dim(carry, rows @ jnp.ones((WIDE, WIDE)), 4 * i, 0)

    def known(x):
        return jax.lax.scan(lambda c, _: (c @ jnp.ones((WIDE, WIDE)), None), x, None, 5)[0]

    def unknown(x, count):
        return jax.lax.fori_loop(0, count, body, x)

    x, count = jnp.ones((ROWS, WIDE)), jnp.int32(2)
    assert read_graph(jax.make_jaxpr(known)(x)).flops == 5 * ONE
    assert read_graph(jax.make_jaxpr(unknown)(x, count)).flops == ONE
    assert read_graph(jax.make_jaxpr(unknown)(x, count), devices=4).flops == ONE / 4


def brute_force(table, budget: Budget, backward_s: float) -> float:
    """Least time over every choice for every name, by trying all of them."""
    best, count = np.inf, len(table.names)
    for choice in itertools.product(("keep", "offload", "recompute"), repeat=count):
        held = sum(1 << i for i, one in enumerate(choice) if one != "recompute")
        on_host = [i for i, one in enumerate(choice) if one == "offload"]
        host = table.held[on_host, held].sum()
        stays = [i for i in range(count) if i not in on_host]
        device = (table.held - table.spared)[stays, held].sum() + table.staged[on_host].sum()
        if device > budget.device_bytes or host > budget.host_bytes:
            continue
        again = table.flops[held] / budget.flops + table.sent[held] / budget.link_bytes_s
        copy = host / budget.host_bytes_s
        exposed = copy + max(copy - backward_s - again, 0)
        best = min(best, again + exposed)
    return best


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_is_better(seed, monkeypatch):
    """Against all 3^n choices, with the figures of every set drawn at random."""
    rng = np.random.default_rng(seed)
    (only,) = layers_of(count=2)
    size, real = 4.0 * ROWS * WIDE, tabulate([only])
    held = rng.integers(1, 4, (3, 8)) * size * [[n >> i & 1 for n in range(8)] for i in range(3)]
    flops = np.sort(rng.integers(0, 50, 8))[::-1] * ONE
    table = real._replace(flops=flops, held=held, staged=rng.integers(0, 2, 3) * size / 2)
    monkeypatch.setattr("moejax.memory.swap_core.tabulate", lambda layers: table)
    rate = 1e9
    budget = Budget(
        rng.uniform(0, 8) * size, rng.uniform(0, 8) * size, rate,
        size / ONE * rate / rng.uniform(1, 20), 1e12,
    )  # fmt: skip
    plan = choose([only], budget)
    assert plan == choose([only], budget)
    found = plan.again_s + plan.exposed_s
    assert found == pytest.approx(brute_force(table, budget, plan.backward_s))
    assert plan.device_bytes <= budget.device_bytes and plan.offloaded_bytes <= budget.host_bytes


def test_the_layer_in_work_counts_once():
    """A step that keeps nothing holds one layer's results too: those of the largest kind."""
    (small,) = layers_of(count=10)
    twice = lambda graph: dataclasses.replace(  # noqa: E731
        graph, nodes=[dataclasses.replace(n, size=2 * n.size) for n in graph.nodes]
    )
    large = small._replace(kind="large", number=1, backward=twice(small.backward))
    each = 4.0 * ROWS * WIDE
    for layers in ([small, large], [large, small]):
        plan = choose(layers, Budget(1e9, 1e9, 1e9, 1e9, 1e9))
        assert plan.names("keep") == NAMES
        assert plan.kept_bytes == 3 * (10 + 2) * each and plan.spared_bytes == 3 * 2 * each
        assert plan.device_bytes == 3 * 10 * each


def test_budgets_decide_what_becomes_of_the_names():
    layers, size = layers_of(count=10), 4.0 * ROWS * WIDE * 10
    roomy = Budget(1e9, 1e9, 1e9, 1e9, 1e9)
    assert choose(layers, roomy).names("keep") == NAMES
    # nothing fits on the device but three layers of each that come and go
    tight = roomy._replace(device_bytes=size * 0.91, host_bytes_s=1e12)
    plan = choose(layers, tight)
    assert (
        plan.names("offload") == NAMES
        and plan.exposed_s < 1e-3 * plan.forward_s
        and plan.saved_share == 1
    )
    assert all("less than computing" in one.reason for one in plan.decisions)
    # copies so slow that computing again is faster
    slow = tight._replace(host_bytes_s=1e3)
    plan = choose(layers, slow)
    assert plan.names("offload") == () and plan.device_bytes <= slow.device_bytes
    # no host memory, room for one
    plan = choose(layers, roomy._replace(device_bytes=1.5 * size, host_bytes=0.0))
    assert len(plan.names("keep")) == 1 and plan.saved_share == pytest.approx(1 / 3)
    assert [one.choice for one in plan.decisions].count("recompute") == 2
    nothing = choose(layers, Budget(0, 0, 1e9, 1e9, 1e9))
    assert nothing.saved_share == 0 and nothing.device_bytes == 0
    assert all("more than are left" in one.reason for one in nothing.decisions)
    with pytest.raises(ValueError, match="bytes short"):
        choose(layers, roomy._replace(device_bytes=-1.0))


def test_a_given_choice_is_weighed_the_same_way():
    layers, budget = layers_of(), Budget(1e9, 1e9, 1e9, 1e9, 1e9)
    best = choose(layers, budget)
    given = plan_for(layers, budget, {one.name: one.choice for one in best.decisions})
    assert given == best
    assert plan_for(layers, budget, {}).flops == best.flops_full
    assert dataclasses.asdict(best)["kept_bytes"] == best.kept_bytes


def test_links_are_found_by_the_device_kind():
    assert host_link("NVIDIA H200").devices == 8
    assert host_link("TPU v5p").host_bytes == 448e9
    assert host_link("cpu").bytes_s == 10e9
