"""A loop over layers that keeps little of each: its input is rebuilt in the backward pass.

A scan under rematerialisation saves its whole carry at every layer. Of Attention Residuals that is
every finished block, again and again: nine vectors a token and layer, of which one changed. Here
the model says what little of the carry a layer must keep (`keep`), and how the state after the last
layer and that little give the carry back (`rebuild`). The rest is `jax.vjp` of each layer, under
the same rematerialisation policies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.memory.host_state import on_host, to_device, to_host
from moejax.memory.policy import Policy, policy_for, remat

Body = Callable[[Any, Any, Any], tuple[Any, Any]]


class Loop(NamedTuple):
    """`repeats` times the same runs in a row; run i has `counts[i]` layers of one body."""

    repeats: int
    counts: tuple[int, ...]


def run_layers(
    bodies: Sequence[Body], carry: Any, xs: Sequence[Any], consts: Any, loop: Loop, *,
    policy: Policy | str, keep: Callable[[Any], Any], rebuild: Callable[[Any, Any], Any],
) -> tuple[Any, list[Any]]:  # fmt: skip
    """All layers in turn.

    Args:
      bodies: of every run, ``(carry, x, consts) -> (carry, aux)``; they close over no tracer.
      carry: the state before the first layer.
      xs: of every run, what its layers get, [repeats, count, ...].
      consts: what every layer gets.
      loop: how often each body runs.
      policy: see `moejax.memory.policy`; where it keeps everything, nothing is rebuilt.
      keep: the part of a layer's input that its backward pass needs.
      rebuild: ``(carry after the last layer, kept) -> carry before the layer``.
    Returns:
      The carry after them, and per run the auxiliary values [repeats, count, ...].
    """
    policy = policy_for(policy) if isinstance(policy, str) else policy
    if policy.everything:
        steps = [lambda carry, x, body=body: body(carry, x, consts) for body in bodies]
        return walk(steps, carry, xs, loop)
    return _rebuilding(bodies, loop, policy, keep, rebuild)(carry, list(xs), consts)


def walk(
    steps, carry, xs, loop: Loop, *, reverse: bool = False, whole: Any = None,
    leave: Callable[[Any], Any] = lambda y: y,
) -> tuple[Any, list[Any]]:  # fmt: skip
    """`steps[i](carry, x) -> (carry, y)` for every layer of every repeat; ys as xs.

    Args:
      leave: what becomes of the ys of a repeat's run, [count, ...], when they leave it. To host
        memory they go here, and from there they come back a repeat's at a time: of two loops, one
        in the other, only the outer one may cut what is in host memory.
      whole: of every run, which leaves of its x no loop cuts: a layer takes its part out of all
        layers' at once. Two loops, one in the other, hold a repeat's part of a leaf and a layer's
        part of that. Not to be differentiated: a gradient would be as large as the leaf. Of those
        in host memory (these are meant where `whole` is not given) the part of a run's next layer
        is fetched while one runs.
    """
    order = range(len(steps))
    taken = [
        _Taken(x, whole[i] if whole else [on_host(leaf) for leaf in jax.tree.leaves(x)])
        for i, x in enumerate(xs)
    ]

    def group(carry, inputs):
        (carry, ahead), (repeat, cut) = carry, inputs
        ahead, ys = list(ahead), [None] * len(steps)
        cut = [[to_device(a) if on_host(a) else a for a in one] for one in cut]
        for i in reversed(order) if reverse else order:

            def layer(carry, inputs, i=i):
                (carry, here), (count, cut) = carry, inputs
                ahead, sizes = here, (loop.repeats, loop.counts[i])
                if taken[i].streams and math.prod(sizes) > 1:
                    ahead = taken[i].fetch(*_after(sizes, repeat, count, reverse))
                carry, y = steps[i](carry, taken[i].layer(repeat, count, cut, here))
                return (carry, ahead), y

            inputs = np.arange(loop.counts[i], dtype=np.int32), cut[i]
            (carry, ahead[i]), ys[i] = scan_layers(
                layer, (carry, ahead[i]), inputs, loop.counts[i], reverse=reverse
            )
            ys[i] = leave(ys[i])
        return (carry, ahead), ys

    repeats = np.arange(loop.repeats, dtype=np.int32)
    inputs = repeats, [one.cut for one in taken]
    first = [np.int32(n - 1 if reverse else 0) for n in (loop.repeats, *loop.counts)]
    ahead = [one.fetch(first[0], count) for one, count in zip(taken, first[1:], strict=True)]
    (carry, _), ys = scan_layers(group, (carry, ahead), inputs, loop.repeats, reverse=reverse)
    return carry, ys


def _after(sizes: tuple[int, int], repeat: Any, count: Any, reverse: bool) -> tuple[Any, Any]:
    """Repeat and count of a run's layer after this one, and of the first after the last."""
    number = repeat * sizes[1] + count + (-1 if reverse else 1)
    number = jnp.mod(number, math.prod(sizes)).astype(jnp.int32)
    return number // sizes[1], number % sizes[1]


class _Taken:
    """What layers get, [repeats, count, ...]: leaves that loops cut, and leaves that stay whole."""

    def __init__(self, x: Any, whole: Sequence[bool]):
        leaves, self.tree = jax.tree.flatten(x)
        hosted = [hit and on_host(leaf) for leaf, hit in zip(leaves, whole, strict=True)]
        kinds = [2 * host or int(hit) for hit, host in zip(whole, hosted, strict=True)]
        self.cut, self.whole, self.hosted = (
            [leaf if kind == wanted else None for leaf, kind in zip(leaves, kinds, strict=True)]
            for wanted in range(3)
        )
        self.streams = any(hosted)

    def fetch(self, repeat: Any, count: Any) -> list:
        """A layer's parts of the leaves in host memory, None for others."""
        return [
            None if leaf is None else to_device(_layer_of(leaf, repeat, count))
            for leaf in self.hosted
        ]

    def layer(self, repeat: Any, count: Any, cut: list, fetched: list) -> Any:
        """What layer `count` of a repeat gets.

        Args:
          cut, fetched: its parts of the leaves that loops cut, and of those in host memory.
        """
        parts = [a if b is None else b for a, b in zip(cut, fetched, strict=True)]
        leaves = [
            part if leaf is None else _layer_of(leaf, repeat, count)
            for part, leaf in zip(parts, self.whole, strict=True)
        ]
        return jax.tree.unflatten(self.tree, leaves)


def _layer_of(leaf: jax.Array, repeat: Any, count: Any) -> jax.Array:
    """[repeats, count, ...] -> [...]."""
    rest = leaf.shape[2:]
    start = (repeat, count, *(np.int32(0) for _ in rest))  # also where Python's integers are wide
    return jax.lax.dynamic_slice(leaf, start, (1, 1, *rest)).reshape(rest)


def scan_layers(step, carry, xs, length: int, *, reverse: bool = False):
    """lax.scan, or the step itself when there is only one.

    A loop of one hides fusion and costs compile time.
    """
    if length > 1:
        return jax.lax.scan(step, carry, xs, reverse=reverse)
    carry, ys = step(carry, jax.tree.map(lambda a: a[0], xs))
    return carry, jax.tree.map(lambda a: a[None], ys)


@dataclasses.dataclass
class _Pull:
    """How a layer's backward function is put together again.

    Attributes:
      tree: its structure.
      places: of every leaf, where the backward pass finds it: a place in the layer's inputs, or
        None for one that is saved.
      outer: leaves that are no tracers.
      wanted: of every leaf of x, whether its gradient is asked for.
    """

    tree: Any
    places: list[int | None]
    outer: dict[int, Any]
    wanted: list[bool]


def _rebuilding(bodies, loop: Loop, policy: Policy, keep, rebuild):
    """`walk` over the bodies, with a gradient that rebuilds their carries."""
    pulls: dict[int, _Pull] = {}  # filled in by the forward pass, read by the backward one

    def plain(carry, xs, consts):
        steps = [lambda carry, x, body=body: body(carry, x, consts) for body in bodies]
        return walk(steps, carry, xs, loop)

    def forward(carry, xs, consts):
        carry, xs_values, consts = (
            jax.tree.map(lambda p: p.value, tree) for tree in (carry, xs, consts)
        )
        wanted = [[p.perturbed and _is_float(p.value) for p in jax.tree.leaves(x)] for x in xs]
        whole = [_frozen(x, hits) for x, hits in zip(xs_values, wanted, strict=True)]
        alone = loop.repeats == 1
        on_device = Policy(keep=(*policy.keep, *policy.offload))

        def step(i, carry, x):
            once = alone and loop.counts[i] == 1
            args = bodies[i], once, wanted[i], carry, x, consts
            out, aux, pull = _vjp(on_device, *args)
            leaves, tree = jax.tree.flatten(pull)
            leaving = _leaving(policy, leaves, args)
            inputs = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves((carry, x, consts)))}
            places = [inputs.get(id(leaf)) for leaf in leaves]
            outer = {n: a for n, a in enumerate(leaves) if not isinstance(a, jax.core.Tracer)}
            pulls[i] = _Pull(tree, places, outer, wanted[i])
            saved = [
                (leaf if not leaves_now else None, leaf if leaves_now else None)
                for n, (leaf, place, leaves_now) in enumerate(
                    zip(leaves, places, leaving, strict=True)
                )
                if place is None and n not in outer
            ]
            return out, (aux, keep(carry), saved)

        def leave(y):
            aux, small, saved = y
            return (
                aux,
                small,
                [(here, None if away is None else to_host(away)) for here, away in saved],
            )

        steps = [lambda carry, x, i=i: step(i, carry, x) for i in range(len(bodies))]
        out, ys = walk(steps, carry, xs_values, loop, whole=whole, leave=leave)
        residuals = (out, [y[1:] for y in ys], xs_values, consts)
        return (out, [y[0] for y in ys]), residuals

    def backward(residuals, cotangents):
        final, kept, xs, consts = residuals
        d_out, d_aux = jax.tree.map(_materialise, cotangents, is_leaf=_is_symbolic)

        def step(i, d_carry, inputs):
            x, small, saved, d_aux = inputs
            carry = rebuild(final, small)
            both = [away if here is None else here for here, away in saved]
            pull = _put_together(pulls[i], (carry, x, consts), both)
            return pull((d_carry, d_aux))

        steps = [lambda d, inputs, i=i: step(i, d, inputs) for i in range(len(bodies))]
        d_aux = [_floats(d) for d in d_aux]
        inputs = [(x, *kept, d) for x, kept, d in zip(xs, kept, d_aux, strict=True)]
        whole = [
            _frozen(x, pulls[i].wanted) + [False] * len(jax.tree.leaves(rest))
            for i, (x, *rest) in enumerate(inputs)
        ]
        d_carry, d_xs = walk(steps, _floats(d_out), inputs, loop, reverse=True, whole=whole)
        d_xs = [_scatter(d, pulls[i].wanted, xs[i]) for i, d in enumerate(d_xs)]
        d_carry = _scatter(d_carry, [_is_float(a) for a in jax.tree.leaves(final)], final)
        return d_carry, d_xs, jax.tree.map(lambda _: None, consts)

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run


def _frozen(x: Any, wanted: Sequence[bool]) -> list[bool]:
    """Which leaves of a run's x are frozen parameters: they have dims of a layer, no gradient."""
    return [leaf.ndim > 2 and not hit for leaf, hit in zip(jax.tree.leaves(x), wanted, strict=True)]


def _leaving(policy: Policy, leaves: list, args: tuple) -> list[bool]:
    """Of what a layer's backward function holds, what goes to host memory."""
    if not policy.offload:
        return [False] * len(leaves)
    body, once, wanted, carry, x, consts = args

    def held(carry, x):
        return jax.tree.leaves(_vjp(policy, body, once, wanted, carry, x, consts)[2])

    found = jax.make_jaxpr(held)(carry, x).out_avals
    assert [a.shape for a in found] == [a.shape for a in leaves]
    return [a.memory_space == jax.memory.Space.Host for a in found]


def _vjp(policy: Policy, body: Body, once: bool, wanted: list[bool], carry, x, consts):
    """One layer: its carry, auxiliary values and ``(d_carry, d_aux) -> (d_carry, d_x)``.

    A layer that runs `once`, in no loop, is kept apart from its own recomputation. Gradients are
    lists of leaves: of the carry's and the auxiliary values' floats, and of what is `wanted` of x.
    """
    trees: list[Any] = []

    def floats(carry_floats, x_wanted):
        given = _merge(carry_floats, [_is_float(a) for a in jax.tree.leaves(carry)], carry)
        out, aux = body(given, _merge(x_wanted, wanted, x), consts)
        trees[:] = [out, aux]
        return (_floats(out), _floats(aux)), (_others(out), _others(aux))

    x_wanted = [a for a, is_wanted in zip(jax.tree.leaves(x), wanted, strict=True) if is_wanted]
    (out, aux), pull, others = jax.vjp(
        remat(floats, policy, apart=once), _floats(carry), x_wanted, has_aux=True
    )
    return _join(out, others[0], trees[0]), _join(aux, others[1], trees[1]), pull


def _put_together(pull: _Pull, inputs, saved):
    given, rest = jax.tree.leaves(inputs), iter(saved)
    leaves = [
        pull.outer[n] if n in pull.outer else next(rest) if place is None else given[place]
        for n, place in enumerate(pull.places)
    ]
    return jax.tree.unflatten(pull.tree, leaves)


def _is_float(a: Any) -> bool:
    return jnp.issubdtype(a.dtype, jnp.inexact)


def _floats(tree: Any) -> list:
    return [a for a in jax.tree.leaves(tree) if _is_float(a)]


def _others(tree: Any) -> list:
    return [a for a in jax.tree.leaves(tree) if not _is_float(a)]


def _merge(new: list, which: list[bool], tree: Any) -> Any:
    """`tree` with the leaves at `which` replaced."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(new)
    return jax.tree.unflatten(
        structure, [next(rest) if hit else a for a, hit in zip(leaves, which, strict=True)]
    )


def _join(floats: list, others: list, like: Any) -> Any:
    """The tree of which these are the floats and the rest."""
    which = [_is_float(a) for a in jax.tree.leaves(like)]
    blank = _merge(floats, which, like)
    return _merge(others, [not hit for hit in which], blank)


def _scatter(new: list, which: list[bool], tree: Any) -> Any:
    """A tree of gradients: `new` at `which`, None elsewhere."""
    leaves, structure = jax.tree.flatten(tree)
    rest = iter(new)
    return jax.tree.unflatten(
        structure, [next(rest) if hit else None for _, hit in zip(leaves, which, strict=True)]
    )


def _is_symbolic(a: Any) -> bool:
    return isinstance(a, jax.custom_derivatives.SymbolicZero)


def _materialise(d: Any) -> Any:
    """Zeros where a gradient is known to be zero."""
    if not _is_symbolic(d):
        return d
    if jnp.issubdtype(d.dtype, jnp.inexact):
        return jnp.zeros(d.shape, d.dtype)
    return np.zeros(d.shape, jax.dtypes.float0)
