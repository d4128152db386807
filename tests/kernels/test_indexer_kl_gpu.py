"""The indexer loss's GPU kernels in the interpreter: values and gradients of both stages."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import indexer_kl, specs
from pallas_kernels.testing import assert_close, compare

INDEX = ("q_idx", "k_idx", "w_idx")
GPU = functools.partial(indexer_kl, impl="pallas_gpu")
REF = functools.partial(indexer_kl, impl="ref")
CASES = specs.CASES | {
    "even64": dataclasses.replace(specs.CASES["odd63"], T=64, J=70, N=3, C=20, R=0, padding=2),
    # several tiles of queries and of keys, several blocks, heads in two groups
    "even257": specs.Case(1, 257, 2, 16, 16, 4, 16, 12, starts=(100,), padding=3),
    "even257_dense": specs.Case(1, 257, 2, 16, 16, 4, 16, None, starts=(100,), padding=3),
}


# each program runs a few times: compiled in a third of the time
@functools.partial(
    jax.jit, static_argnames=("impl", "scale"),
    compiler_options={"xla_backend_optimization_level": 0},
)  # fmt: skip
def value_and_pullback(x, dkl, *, scale, impl="pallas_gpu"):
    rest = {name: a for name, a in x.items() if name not in INDEX}
    loss = lambda *index: indexer_kl(*index, **rest, scale=scale, impl=impl)  # noqa: E731
    kl, pullback = jax.vjp(loss, *(x[name] for name in INDEX))
    return kl, dict(zip(INDEX, pullback(dkl), strict=True))


RUNS: list = [("even64", "float32"), ("odd65_dense", "float32")]
RUNS += [("odd63", "bfloat16"), ("even257_dense", "bfloat16")]
RUNS += [
    pytest.param(name, "float32", marks=pytest.mark.slow)
    for name in ("one", "one_dense", "more_than_all", "even257")
]


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_values_and_gradients_equal_reference(name, dtype):
    case = CASES[name]
    x = specs.with_sets(case, case.inputs(jnp.dtype(dtype)))
    errors = compare(GPU, REF, x, wrt=INDEX, floor=1e-3, **case.options())
    assert_close(errors, specs.TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["even64", "odd65_dense"])
def test_what_no_query_sees_may_hold_anything(name):
    """NaN in padding's queries and keys, and as the lse of queries without keys."""
    case = CASES[name]
    x = specs.with_sets(case, case.inputs())
    ones = jnp.ones((case.B, case.T))
    value, grads = value_and_pullback(x, ones, **case.options())
    lost = slice(case.T - case.padding, None)
    poisoned = {n: a.at[:, lost].set(jnp.nan) for n, a in x.items() if a.dtype == jnp.float32}
    kl, found = value_and_pullback(x | poisoned, ones, **case.options())
    np.testing.assert_array_equal(kl, value)
    np.testing.assert_array_equal(kl[:, lost], 0)
    for name in INDEX:
        np.testing.assert_array_equal(found[name], grads[name])
        np.testing.assert_array_equal(found[name][:, lost], 0)


def test_one_key_is_exactly_zero():
    case = dataclasses.replace(CASES["odd63"], J=1)
    x = specs.with_sets(case, case.inputs())
    kl, grads = value_and_pullback(x, jnp.ones((case.B, case.T)), **case.options())
    assert (kl == 0).all() and all((grad == 0).all() for grad in grads.values())


@pytest.mark.parametrize("slices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_slices_of_queries_add_up_to_the_whole(slices):
    """Queries local, keys of all: the loss side by side, dk summed over the slices."""
    case = dataclasses.replace(CASES["even64"], R=4, padding=0)
    x = specs.with_sets(case, case.inputs())
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal((case.B, case.T), np.float32))
    kl, grads = value_and_pullback(x, cotangent, impl="chunked", **case.options())
    of_keys, size, parts = ("k_idx", "latent", "k_rope"), case.T // slices, []
    for start in range(0, case.T, size):
        cut = lambda a: a[:, start : start + size]  # noqa: B023, E731
        part = {name: a if name in of_keys else cut(a) for name, a in x.items()}
        parts.append(value_and_pullback(part, cut(cotangent), **case.options()))
    whole = {
        name: sum(p[1][name] for p in parts)
        if name in of_keys
        else jnp.concatenate([p[1][name] for p in parts], axis=1)
        for name in INDEX
    }
    np.testing.assert_allclose(jnp.concatenate([p[0] for p in parts], 1), kl, atol=1e-6)
    for name in INDEX:
        np.testing.assert_allclose(whole[name], grads[name], rtol=1e-4, atol=1e-6)


def test_refusals():
    case = CASES["odd63"]
    x = specs.with_sets(case, case.inputs())
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        doubles = {
            name: a.astype(jnp.float64) if a.dtype == jnp.float32 else a for name, a in x.items()
        }
        GPU(**doubles, **case.options())
