"""permute and unpermute against plain indexing; the plan against a stable sort."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.permute import permute, plan_permute, specs, unpermute
from pallas_kernels.testing import assert_close, compare

_plan = jax.jit(plan_permute, static_argnums=1)


def check_plan(ids_MA: np.ndarray, num_experts: int) -> None:
    plan = _plan(jnp.asarray(ids_MA), num_experts)
    flat = np.where((ids_MA < 0) | (ids_MA > num_experts), num_experts, ids_MA).reshape(-1)
    order = np.argsort(flat, kind="stable")
    np.testing.assert_array_equal(plan.order, order)
    np.testing.assert_array_equal(
        np.asarray(plan.positions).reshape(-1)[order], np.arange(flat.size)
    )
    np.testing.assert_array_equal(
        plan.group_sizes, np.bincount(flat, minlength=num_experts + 1)[:-1]
    )
    assert plan.group_sizes.dtype == plan.order.dtype == jnp.int32


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (63, 2), (130, 3)]),
    st.sampled_from([1, 2, 12]),
)
def test_plan_is_a_stable_sort(seed, shape, num_experts):
    ids = np.random.default_rng(seed).integers(0, num_experts + 1, shape).astype(np.int32)
    check_plan(ids, num_experts)


@pytest.mark.parametrize("fill", [-1, 0, 3, 4, 9])
def test_plan_of_equal_ids(fill):
    check_plan(np.full((300, 2), fill, np.int32), 4)


def test_plan_refuses_no_experts():
    with pytest.raises(ValueError, match="num_experts=0"):
        plan_permute(jnp.zeros((2, 2), jnp.int32), 0)


@pytest.mark.parametrize("name", specs.CASES)
def test_values_and_gradients_equal_reference(name):
    case = specs.CASES[name]
    x, weights, ids = specs.make_inputs(case)
    plan = plan_permute(ids, case.num_experts)
    rows = permute(x, plan)
    tolerance = specs.TOLERANCES[case.dtype]

    def permute_ref(x):
        return permute(x, plan, impl="ref")

    def unpermute_ref(rows, weights):
        return unpermute(rows, weights, plan, impl="ref")

    assert_close(compare(lambda x: permute(x, plan), permute_ref, {"x": x}), tolerance)
    inputs = {"rows": rows, "weights": weights}
    errors = compare(lambda rows, weights: unpermute(rows, weights, plan), unpermute_ref, inputs)
    assert_close(errors, tolerance)


def test_round_trip_returns_weighted_tokens():
    x, weights, ids = specs.make_inputs(specs.CASES["odd"])
    plan = plan_permute(ids, 7)
    out = unpermute(permute(x, plan), weights / weights.sum(-1, keepdims=True), plan)
    np.testing.assert_allclose(out, x, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", [None, "ref", "chunked"])
def test_rows_behind_the_last_group_do_not_leak(impl):
    case = specs.CASES["unrouted"]
    x, weights, ids = specs.make_inputs(case)
    plan = plan_permute(ids, case.num_experts)
    num_real = int(plan.group_sizes.sum())
    assert 0 < num_real < ids.size
    rows = permute(x, plan)
    np.testing.assert_array_equal(rows[num_real:], 0)

    def loss(rows, weights):
        return jnp.sum(jnp.sin(unpermute(rows, weights, plan, impl=impl)))

    grad = jax.value_and_grad(loss, argnums=(0, 1))
    clean, poisoned = grad(rows, weights), grad(rows.at[num_real:].set(jnp.nan), weights)
    jax.tree.map(np.testing.assert_array_equal, clean, poisoned)
    np.testing.assert_array_equal(clean[1][0][num_real:], 0)
    np.testing.assert_array_equal(clean[1][1][ids == case.num_experts], 0)
    poisoned_cotangent = jnp.ones_like(rows).at[num_real:].set(jnp.nan)
    (dx,) = jax.vjp(lambda x: permute(x, plan, impl=impl), x)[1](poisoned_cotangent)
    assert np.isfinite(dx).all()


def test_backward_has_no_scatter_add():
    x, weights, ids = specs.make_inputs(specs.CASES["odd"])
    plan = plan_permute(ids, 7)

    def loss(x, weights):
        return jnp.sum(unpermute(permute(x, plan), weights, plan) ** 2)

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, weights))


def test_float64_stays_float64():
    with jax.enable_x64(True):
        plan = plan_permute(jnp.array([[0], [1]]), 2)
        rows = permute(jnp.ones((2, 3), jnp.float64), plan)
        assert unpermute(rows, jnp.ones((2, 1)), plan).dtype == jnp.float64


@pytest.mark.parametrize("bad", ["x", "rows", "weights"])
def test_shapes_that_disagree_are_named(bad):
    plan = plan_permute(jnp.zeros((4, 2), jnp.int32), 3)
    if bad == "x":
        with pytest.raises(ValueError, match="3 tokens"):
            permute(jnp.ones((3, 2)), plan)
    else:
        rows = jnp.ones((7 if bad == "rows" else 8, 2))
        weights = jnp.ones((4, 1 if bad == "weights" else 2))
        with pytest.raises(ValueError, match="do not fit a plan"):
            unpermute(rows, weights, plan)
