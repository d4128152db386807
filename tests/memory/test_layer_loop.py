"""The loop over layers: same values and gradients under every policy, little saved, no waste."""

import functools

import jax
import jax.numpy as jnp
import pytest

from moejax.memory.layer_loop import Loop, run_layers
from moejax.memory.names import tag
from moejax.memory.policy import POLICIES, Policy

WIDTH, PLACES = 16, 5
LOOPS = [Loop(3, (2, 1)), Loop(1, (1, 3)), Loop(1, (1, 1)), Loop(4, (1,))]


def start(rows=3):
    """A bank of finished vectors, the running sum at place `last`."""
    bank = (
        jnp.zeros((PLACES, rows, WIDTH))
        .at[0]
        .set(jax.random.normal(jax.random.key(1), (rows, WIDTH)))
    )
    return {"bank": bank, "last": jnp.int32(0)}


def body(carry, x, consts, *, scale):
    """Reads all finished vectors and the running sum; closes a block at every third layer."""
    weights, number = x
    shift, key = consts
    counts = (jnp.arange(PLACES) <= carry["last"])[:, None, None]
    read = jnp.sum(jnp.where(counts, jnp.sin(carry["bank"]), 0), 0)
    last = jnp.minimum(carry["last"] + (number % 3 == 2), PLACES - 1)
    noise = jax.random.normal(jax.random.fold_in(key, number), read.shape)
    mapped = tag((read + shift[:, None] + 0.1 * noise) @ weights["w"], "attention_out")
    out = scale * jnp.tanh(mapped) * weights["frozen"]
    bank = carry["bank"].at[last].add(out)
    return {"bank": bank, "last": last}, {"norm": jnp.sum(out**2), "number": number}


def keep(carry):
    return carry["bank"][carry["last"]], carry["last"]


def rebuild(final, kept):
    running, last = kept
    place = jnp.arange(PLACES)[:, None, None]
    finished = jnp.where(place < last, final["bank"], 0)
    return {"bank": jnp.where(place == last, running, finished), "last": last}


def inputs(loop):
    key, xs = jax.random.key(0), []
    for i, count in enumerate(loop.counts):
        lead = (loop.repeats, count)
        w = jax.random.normal(jax.random.fold_in(key, i), (*lead, WIDTH, WIDTH)) / WIDTH**0.5
        xs.append({"w": w, "frozen": jnp.full((*lead, WIDTH), 1.5)})
    return xs


def numbers(loop):
    period, numbers, offset = sum(loop.counts), [], 0
    for count in loop.counts:
        first = offset + period * jnp.arange(loop.repeats)
        numbers.append(first[:, None] + jnp.arange(count))
        offset += count
    return numbers


def objective(xs, carry, shift, *, loop, policy):
    bodies = [functools.partial(body, scale=1.0 + i) for i in range(len(loop.counts))]
    given = list(zip(xs, numbers(loop), strict=True))
    out, aux = run_layers(
        bodies, carry, given, (shift, jax.random.key(7)), loop,
        policy=policy, keep=keep, rebuild=rebuild,
    )  # fmt: skip
    return jnp.sum(jnp.cos(out["bank"])) + sum(jnp.sum(a["norm"]) for a in aux), aux


@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_policies_agree_in_values_and_gradients(loop):
    xs, carry, shift = inputs(loop), start(), jnp.arange(3.0)
    found = {}
    policies = [*POLICIES, Policy(offload=("attention_out",))]
    for policy in policies:
        run = jax.value_and_grad(
            lambda xs, bank, policy=policy: objective(
                xs, carry | {"bank": bank}, shift, loop=loop, policy=policy
            ),
            argnums=(0, 1), has_aux=True,
        )  # fmt: skip
        found[policy] = jax.jit(run)(xs, carry["bank"])
    for policy in policies[1:]:
        jax.tree.map(_close, found["none"], found[policy])


def _close(a, b):
    assert a.shape == b.shape
    assert jnp.max(jnp.abs(a - b)) <= 2e-5 * (1 + jnp.max(jnp.abs(a)))


def _saved_bytes(places, policy):
    """Temporaries of a gradient over 24 layers with a bank of so many places."""
    loop = Loop(8, (3,))

    def loss(bank, w):
        def step(carry, x, consts):
            total = jnp.tanh(jnp.sum(carry, 0) @ x)
            return carry.at[0].add(total), total[0, 0]

        out, _ = run_layers(
            [step], bank, [w], (), loop, policy=policy,
            keep=lambda c: c[0], rebuild=lambda final, kept: final.at[0].set(kept),
        )  # fmt: skip
        return jnp.sum(out**2)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((places, 512, 64), (8, 3, 64, 64))]
    compiled = jax.jit(jax.grad(loss, argnums=1)).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_a_layer_saves_what_it_must_keep_and_not_its_carry():
    one = 512 * 64 * 4
    # 4 and 12 places: the carry itself in a few copies, never 24 times
    assert _saved_bytes(12, "full") - _saved_bytes(4, "full") < 8 * one * 8
    assert _saved_bytes(12, "none") - _saved_bytes(4, "none") < 24 * one * 8


def test_of_what_is_not_trained_no_gradient_is_computed():
    loop = LOOPS[0]
    xs, carry, shift = inputs(loop), start(), jnp.arange(3.0)

    def flops(wrt):
        def loss(part):
            merged = [x | p for x, p in zip(xs, part, strict=True)]
            return objective(merged, carry, shift, loop=loop, policy="full")[0]

        part = [{wrt: x[wrt]} for x in xs]
        return str(jax.make_jaxpr(jax.grad(loss))(part)).count("dot_general")

    # forward, forward again and the gradient of the input each run hold one product; of the
    # weights, there is one more
    assert flops("frozen") + len(loop.counts) == flops("w")


def test_under_a_scan_of_microbatches():
    loop = LOOPS[0]
    xs, carry = inputs(loop), start()
    shifts = jnp.stack([jnp.arange(3.0), jnp.ones(3)])

    def total(policy):
        def one(sums, shift):
            grads = jax.grad(lambda x: objective(x, carry, shift, loop=loop, policy=policy)[0])(xs)
            return jax.tree.map(jnp.add, sums, grads), None

        return jax.jit(lambda: jax.lax.scan(one, jax.tree.map(jnp.zeros_like, xs), shifts)[0])()

    jax.tree.map(_close, total("none"), total("full"))


def _gradient(loop, wrt):
    """The jaxpr of a gradient with respect to some of the leaves, as text."""
    xs, carry, shift = inputs(loop), start(), jnp.arange(3.0)

    def loss(part):
        merged = [x | p for x, p in zip(xs, part, strict=True)]
        return objective(merged, carry, shift, loop=loop, policy="full")[0]

    return str(jax.make_jaxpr(jax.grad(loss))([{wrt: x[wrt]} for x in xs]))


def test_no_loop_holds_the_frozen_weights_of_a_whole_repeat():
    """A layer takes its own out of all layers'; what is trained is cut loop by loop."""
    loop, repeat = Loop(2, (3,)), f"f32[3,{WIDTH},{WIDTH}]"
    assert repeat not in _gradient(loop, "frozen")
    assert repeat in _gradient(loop, "w")


def test_layers_outside_of_loops_are_kept_apart_from_their_recomputation():
    """Else the compiler keeps what both passes gather, from one to the other."""
    assert "prevent_cse=True" in _gradient(Loop(1, (1, 3)), "w")
    assert "prevent_cse=True" not in _gradient(Loop(3, (1, 2)), "w")
