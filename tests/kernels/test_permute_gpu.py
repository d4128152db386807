"""permute and unpermute for GPUs, in Pallas' interpreter, against plain indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.permute import PermutePlan, permute, specs, unpermute
from pallas_kernels.permute.tiles import tiles_for
from pallas_kernels.testing import assert_close, compare

# two parts of columns, the second one cut short, and a last program that is not full; bfloat16 in
# slots without an expert; many programs of one token's one slot
CASES = {
    "parts": specs.Case(num_tokens=9, num_active=2, num_experts=3, width=520, unrouted=0.2),
    "bfloat16": specs.Case(
        num_tokens=63, num_active=3, num_experts=7, width=24, dtype="bfloat16", unrouted=0.1
    ),
    "many_tokens": specs.Case(num_tokens=1000, num_active=1, num_experts=5, width=4),
}


def _inputs(case):
    """As `specs.make_inputs` and `plan_permute`, without programs to compile."""
    rng = np.random.default_rng(0)
    shape = (case.num_tokens, case.num_active)
    ids = np.where(rng.random(shape) < case.unrouted, case.num_experts, 0)
    ids = np.maximum(ids, rng.integers(0, case.num_experts, shape))
    order = np.argsort(ids.reshape(-1), kind="stable")
    sizes = np.bincount(ids.reshape(-1), minlength=case.num_experts + 1)[:-1]
    plan = (order, np.argsort(order).reshape(shape), sizes)
    x = rng.standard_normal((case.num_tokens, case.width), np.float32)
    weights = rng.random(shape, np.float32)
    plan = PermutePlan(*(jnp.asarray(a, jnp.int32) for a in plan))
    return jnp.asarray(x, case.dtype), jnp.asarray(weights), plan


def _permute(plan, impl):
    return lambda x: permute(x, plan, impl=impl)


def _unpermute(plan, impl):
    return lambda rows, weights: unpermute(rows, weights, plan, impl=impl)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_reference(name):
    case = CASES[name]
    x, weights, plan = _inputs(case)
    errors = compare(_permute(plan, "pallas_gpu"), _permute(plan, "ref"), {"x": x})
    assert errors["out0"] == 0
    assert_close(errors, specs.TOLERANCES[case.dtype])
    inputs = {"rows": permute(x, plan), "weights": weights}
    errors = compare(_unpermute(plan, "pallas_gpu"), _unpermute(plan, "ref"), inputs)
    assert_close(errors, specs.TOLERANCES[case.dtype])


@pytest.fixture(scope="module")
def unrouted():
    return _inputs(CASES["parts"])


def test_rows_behind_the_last_group_do_not_leak(unrouted):
    x, weights, plan = unrouted
    num_real = int(plan.group_sizes.sum())
    rows = permute(x, plan, impl="pallas_gpu")
    assert 0 < num_real < rows.shape[0]
    np.testing.assert_array_equal(rows[num_real:], 0)
    poisoned = rows.at[num_real:].set(jnp.nan)

    @jax.jit
    def all_of_it(x, rows, weights):
        out, pullback = jax.vjp(_unpermute(plan, "pallas_gpu"), rows, weights)
        (dx,) = jax.vjp(_permute(plan, "pallas_gpu"), x)[1](rows)
        return out, *pullback(jnp.ones_like(out)), dx

    found = all_of_it(x, poisoned, weights)
    assert all(np.isfinite(a).all() for a in found)
    np.testing.assert_array_equal(found[1][num_real:], 0)


def test_a_plan_of_fewer_rows_than_assignments():
    """As of a window: positions outside are one past the last, rows behind the sizes no one's."""
    order = jnp.array([3, 1, 4, 0, 0], jnp.int32)
    positions = jnp.array([[5, 1], [5, 0], [2, 5]], jnp.int32)
    plan = PermutePlan(order, positions, jnp.array([2, 1], jnp.int32))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 6), np.float32))
    rows = jax.jit(_permute(plan, "pallas_gpu"))(x)
    np.testing.assert_array_equal(rows, permute(x, plan))
    np.testing.assert_array_equal(rows[:, 0], [x[1, 0], x[0, 0], x[2, 0], 0, 0])
    weights = x[:, :2]

    def both_ways(impl):
        out, pullback = jax.vjp(_unpermute(plan, impl), rows, weights)
        return out, *pullback(x)

    out, d_rows, d_weights = jax.jit(both_ways, static_argnums=0)("pallas_gpu")
    expected = jax.jit(both_ways, static_argnums=0)("chunked")
    np.testing.assert_allclose(out, expected[0], rtol=1e-6)
    np.testing.assert_allclose(d_rows[:3], expected[1][:3], rtol=1e-6)
    np.testing.assert_array_equal(d_rows[3:], 0)
    # a weight outside has no gradient here; whoever cuts windows masks it there
    np.testing.assert_array_equal(d_weights[positions == 5], 0)


def test_float64_is_refused(unrouted):
    plan = unrouted[2]
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        permute(jnp.ones((9, 8), jnp.float64), plan, impl="pallas_gpu")


def test_columns_of_real_rows_need_no_mask():
    for width in (2304, 3584, 7168):
        columns = tiles_for(8192, width).columns
        assert columns & (columns - 1) == 0
        assert width % columns in (0, 256)
