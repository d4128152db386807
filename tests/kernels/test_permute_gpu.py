"""permute and unpermute for GPUs, in Pallas' interpreter, against plain indexing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.permute import PermutePlan, permute, plan_permute, specs, unpermute
from pallas_kernels.permute.tiles import tiles_for
from pallas_kernels.testing import assert_close, compare

CASES = specs.CASES | {
    # two parts of columns, the second one cut short, and a last program that is not full
    "parts": specs.Case(num_tokens=9, num_active=2, num_experts=3, width=520, unrouted=0.2),
    "many_tokens": specs.Case(num_tokens=1000, num_active=1, num_experts=5, width=4),
}
# wider or longer than the cases above, and no other: an interpreter is slow
LEFT_OUT = ("large_odd", "one_token", "more_experts_than_rows")


def _permute(plan, impl):
    return lambda x: permute(x, plan, impl=impl)


def _unpermute(plan, impl):
    return lambda rows, weights: unpermute(rows, weights, plan, impl=impl)


@pytest.mark.parametrize("name", [name for name in CASES if name not in LEFT_OUT])
def test_values_and_gradients_equal_reference(name):
    case = CASES[name]
    x, weights, ids = specs.make_inputs(case)
    plan = plan_permute(ids, case.num_experts)
    errors = compare(_permute(plan, "pallas_gpu"), _permute(plan, "ref"), {"x": x})
    assert errors["out0"] == 0
    assert_close(errors, specs.TOLERANCES[case.dtype])
    inputs = {"rows": permute(x, plan), "weights": weights}
    errors = compare(_unpermute(plan, "pallas_gpu"), _unpermute(plan, "ref"), inputs)
    assert_close(errors, specs.TOLERANCES[case.dtype])


@pytest.fixture(scope="module")
def unrouted():
    case = specs.CASES["unrouted"]
    x, weights, ids = specs.make_inputs(case)
    return x, weights, plan_permute(ids, case.num_experts)


def test_rows_behind_the_last_group_do_not_leak(unrouted):
    x, weights, plan = unrouted
    num_real = int(plan.group_sizes.sum())
    rows = permute(x, plan, impl="pallas_gpu")
    assert 0 < num_real < rows.shape[0]
    np.testing.assert_array_equal(rows[num_real:], 0)
    poisoned = rows.at[num_real:].set(jnp.nan)
    out, pullback = jax.vjp(_unpermute(plan, "pallas_gpu"), poisoned, weights)
    d_rows, d_weights = pullback(jnp.ones_like(out))
    assert np.isfinite(out).all() and np.isfinite(d_rows).all() and np.isfinite(d_weights).all()
    np.testing.assert_array_equal(d_rows[num_real:], 0)
    (dx,) = jax.vjp(_permute(plan, "pallas_gpu"), x)[1](poisoned)
    assert np.isfinite(dx).all()


def test_a_plan_of_fewer_rows_than_assignments():
    """As of a window: positions outside are one past the last, rows behind the sizes no one's."""
    order = jnp.array([3, 1, 4, 0, 0], jnp.int32)
    positions = jnp.array([[5, 1], [5, 0], [2, 5]], jnp.int32)
    plan = PermutePlan(order, positions, jnp.array([2, 1], jnp.int32))
    x = jax.random.normal(jax.random.key(0), (3, 6))
    rows = jax.jit(_permute(plan, "pallas_gpu"))(x)
    np.testing.assert_array_equal(rows, permute(x, plan))
    np.testing.assert_array_equal(rows[:, 0], [x[1, 0], x[0, 0], x[2, 0], 0, 0])
    weights = jax.random.uniform(jax.random.key(1), (3, 2))
    pulled = [jax.vjp(_unpermute(plan, impl), rows, weights) for impl in ("pallas_gpu", "chunked")]
    np.testing.assert_allclose(pulled[0][0], pulled[1][0], rtol=1e-6)
    # a weight outside the window has no gradient here; whoever cuts windows masks it there
    d_rows, d_weights = pulled[0][1](x)
    np.testing.assert_allclose(d_rows[:3], pulled[1][1](x)[0][:3], rtol=1e-6)
    np.testing.assert_array_equal(d_rows[3:], 0)
    np.testing.assert_array_equal(d_weights[positions == 5], 0)


def test_float64_is_refused(unrouted):
    _, weights, plan = unrouted
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        permute(jnp.ones((64, 8), jnp.float64), plan, impl="pallas_gpu")


def test_columns_of_real_rows_need_no_mask():
    for width in (2304, 3584, 7168):
        columns = tiles_for(8192, width).columns
        assert columns & (columns - 1) == 0
        assert width % columns in (0, 256)
