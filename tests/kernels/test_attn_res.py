"""attn_res against the plain form, and its invariants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res, mix_bank, mix_two_phase, specs
from pallas_kernels.testing import assert_close, compare, relative_rms

EPS = 1e-5


@pytest.mark.parametrize(
    ("name", "traced"), [*((name, False) for name in specs.CASES), ("odd", True)]
)
def test_values_and_gradients_equal_reference(name, traced):
    case = specs.CASES[name]
    query, norm_weight, sources = specs.make_inputs(case)
    used = jnp.int32(case.used) if traced else case.used

    def run(impl):
        return lambda query, norm_weight, sources: attn_res(
            query, norm_weight, sources, num_sources=used, eps=EPS, impl=impl
        )

    inputs = {"query": query, "norm_weight": norm_weight, "sources": sources}
    assert_close(compare(run("chunked"), run("ref"), inputs), specs.TOLERANCES[case.dtype])


@pytest.mark.parametrize("traced", [False, True])
def test_unused_sources_may_hold_nan(traced):
    case = specs.CASES["odd"]

    @jax.jit
    def value_and_grads(query, norm_weight, sources, used):
        def fn(*a):
            return attn_res(*a, num_sources=used if traced else case.used, eps=EPS)

        out, pullback = jax.vjp(fn, query, norm_weight, sources)
        return out, *pullback(jnp.cos(out))

    used = jnp.int32(case.used)
    clean = value_and_grads(*specs.make_inputs(case), used)
    poisoned = value_and_grads(*specs.make_inputs(case, unused=jnp.nan), used)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(poisoned[3][case.used :], 0)
    assert all(np.isfinite(a).all() for a in poisoned)


def mix(query, norm_weight, sources, **options):
    return attn_res(query, norm_weight, sources, **({"eps": EPS} | options))


def test_zero_query_gives_the_mean():
    query, norm_weight, sources = specs.make_inputs(specs.CASES["long"])
    out = mix(jnp.zeros_like(query), norm_weight, sources)
    np.testing.assert_allclose(out, sources.mean(0), rtol=1e-5, atol=1e-6)


def test_weights_sum_to_one():
    # the last feature is the same in every source, so a mean of sources keeps it
    query, norm_weight, sources = specs.make_inputs(specs.CASES["long"])
    out = mix(query, norm_weight, sources.at[..., -1].set(3.0))
    np.testing.assert_allclose(out[..., -1], 3.0, rtol=1e-6)


def test_one_source_passes_through():
    query, norm_weight, sources = specs.make_inputs(specs.CASES["odd"])
    np.testing.assert_array_equal(mix(10 * query, norm_weight, sources, num_sources=1), sources[0])


@pytest.mark.parametrize("num_bank", [1, 2, 4])
def test_two_phase_equals_direct(num_bank):
    query, norm_weight, sources = specs.make_inputs(specs.CASES["long"])
    sources = sources[: num_bank + 1]

    def two_phase(query, norm_weight, sources):
        return mix_two_phase(query, norm_weight, sources[:-1], sources[-1], eps=EPS)

    inputs = {"query": query, "norm_weight": norm_weight, "sources": sources}
    assert_close(compare(two_phase, mix, inputs), 2e-6)


def test_bank_is_mixed_for_each_query():
    _, _, bank = specs.make_inputs(specs.CASES["odd"])
    queries = jax.random.normal(jax.random.key(7), (3, 7))
    norm_weights = jax.random.normal(jax.random.key(8), (3, 7))
    out = mix_bank(queries, norm_weights, bank[:3], eps=EPS)
    for y in range(3):
        expected = mix(queries[y], norm_weights[y], bank[:3])
        np.testing.assert_allclose(out.mix[y], expected, rtol=2e-5, atol=1e-6)


def test_scaling_a_source_keeps_its_logit():
    query, norm_weight, sources = specs.make_inputs(specs.CASES["odd"])
    sources = sources[:3]
    before = mix(query, norm_weight, sources, eps=0.0)
    after = mix(query, norm_weight, sources.at[1].multiply(4.0), eps=0.0)
    # the weight of source 1 stays a, so the mix moves by 3 a b_1: along b_1, by a factor in (0, 3)
    moved = (after - before) / (3 * sources[1])
    weight = moved.mean(-1, keepdims=True)
    np.testing.assert_allclose(moved, jnp.broadcast_to(weight, moved.shape), rtol=2e-2, atol=1e-4)
    again = mix(query, norm_weight, sources.at[1].multiply(9.0), eps=0.0)
    np.testing.assert_allclose(again - before, 8 * weight * sources[1], rtol=1e-3, atol=1e-3)
    assert weight.min() > 0 and weight.max() < 1


def test_query_and_norm_weight_act_through_their_product():
    query, norm_weight, sources = specs.make_inputs(specs.CASES["odd"])
    fused = mix(query * norm_weight, jnp.ones_like(query), sources, num_sources=3)
    np.testing.assert_array_equal(mix(query, norm_weight, sources, num_sources=3), fused)


def test_golden_weights():
    sources = jnp.eye(2)[:, None, None, :]
    query = jnp.array([np.log(2) / np.sqrt(2), 0.0])
    out = mix(query, jnp.ones(2), sources, eps=0.0)
    np.testing.assert_allclose(out[0, 0], [2 / 3, 1 / 3], rtol=1e-6)


def test_backward_keeps_the_arguments_alone():
    query, norm_weight, sources = specs.make_inputs(specs.CASES["bfloat16"])
    _, pullback = jax.vjp(lambda *a: mix(*a), query, norm_weight, sources)
    kept = sorted((a.shape, str(a.dtype)) for a in jax.tree.leaves(pullback) if a.size > 1)
    expected = sorted((a.shape, str(a.dtype)) for a in (query, norm_weight, sources))
    assert kept == expected


def test_float64_stays_float64():
    with jax.enable_x64(True):
        arrays = [a.astype(jnp.float64) for a in specs.make_inputs(specs.CASES["odd"])]
        expected = mix(*arrays, impl="ref")
        assert expected.dtype == jnp.float64
        assert relative_rms(mix(*arrays), expected) <= 1e-14


@pytest.mark.parametrize("num_sources", [0, 6, -1])
def test_number_of_sources_out_of_range(num_sources):
    with pytest.raises(ValueError, match=f"num_sources={num_sources} is outside 1..5"):
        mix(*specs.make_inputs(specs.CASES["odd"]), num_sources=num_sources)
    with pytest.raises(ValueError, match="0 sources"):
        mix_bank(jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.ones((0, 1, 1, 2)), eps=EPS)
