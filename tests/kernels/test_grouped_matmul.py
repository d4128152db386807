"""grouped_matmul against the loop over groups, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_matmul import grouped_matmul, specs
from pallas_kernels.grouped_matmul.activation import gated
from pallas_kernels.testing import assert_close, compare, relative_rms


@pytest.mark.parametrize("name", specs.CASES)
def test_values_and_gradients_equal_reference(name):
    case = specs.CASES[name]
    rows, weights, sizes = specs.make_inputs(case)
    errors = compare(
        lambda rows, weights: grouped_matmul(rows, weights, sizes, activation=case.activation),
        lambda rows, weights: grouped_matmul(
            rows, weights, sizes, activation=case.activation, impl="ref"
        ),
        {"rows": rows, "weights": weights},
        floor=1e-3 if name == "nothing" else 1e-30,
    )
    assert_close(errors, specs.TOLERANCES[case.dtype])


@pytest.mark.parametrize("seed", range(4))
def test_equals_loop_over_experts_in_numpy(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.multinomial(200, rng.dirichlet(np.full(6, 0.3)))
    rows, weights = rng.normal(size=(210, 9)), rng.normal(size=(6, 9, 4))
    expected, start = np.zeros((210, 4)), 0
    for e, size in enumerate(sizes):
        expected[start : start + size] = rows[start : start + size] @ weights[e]
        start += size
    with jax.enable_x64(True):
        out = jax.jit(grouped_matmul)(jnp.array(rows), jnp.array(weights), jnp.array(sizes))
        assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["tail", "situ", "nothing"])
def test_rows_past_the_last_group_do_not_leak(name):
    case = specs.CASES[name]
    num_real = sum(case.group_sizes)

    @jax.jit
    def value_and_grads(rows, weights, sizes, cotangent):
        def fn(rows, weights):
            return grouped_matmul(rows, weights, sizes, activation=case.activation)

        out, pullback = jax.vjp(fn, rows, weights)
        return out, *pullback(cotangent)

    clean = specs.make_inputs(case)
    cotangent = jnp.cos(jnp.arange(case.num_rows))[:, None]
    cotangent *= jnp.ones(case.f_dim // (2 if case.activation else 1))
    expected = value_and_grads(*clean, cotangent)
    poison = value_and_grads(
        *specs.make_inputs(case, tail=jnp.nan), cotangent.at[num_real:].set(jnp.nan)
    )
    jax.tree.map(np.testing.assert_array_equal, poison, expected)
    out, d_rows, d_weights = poison
    np.testing.assert_array_equal(out[num_real:], 0)
    np.testing.assert_array_equal(d_rows[num_real:], 0)
    empty = np.array(case.group_sizes) == 0
    np.testing.assert_array_equal(d_weights[empty], 0)
    assert name == "nothing" or np.abs(d_weights[~empty]).min() > 0


def test_situ_golden_numbers():
    pairs = jnp.array([[1.0, 1.0], [2.0, -3.0], [-1.0, 2.0]])
    expected = [0.715817828, -4.861066551, -0.525828896]
    np.testing.assert_allclose(gated(pairs, "situ", (4.0, 25.0))[:, 0], expected, rtol=3e-7)
    wide = gated(pairs, "situ", (1e4, 1e4))
    np.testing.assert_allclose(wide, gated(pairs, "swiglu", (4.0, 25.0)), rtol=1e-6)


def test_runs_inside_shard_map_with_gradients():
    mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    rows = jnp.array(rng.normal(size=(8 * 20, 6)), jnp.float32)
    weights = jnp.array(rng.normal(size=(16, 6, 8)), jnp.float32)
    sizes = jnp.array(rng.integers(0, 11, 16), jnp.int32)
    spec = jax.sharding.PartitionSpec("expert")

    def local(rows, weights, sizes):
        return grouped_matmul(rows, weights, sizes, activation="swiglu")

    sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def plain(rows, weights, sizes):
        parts = rows.reshape(8, 20, 6), weights.reshape(8, 2, 6, 8), sizes.reshape(8, 2)
        return jnp.concatenate(
            [
                grouped_matmul(*(p[d] for p in parts), activation="swiglu", impl="ref")
                for d in range(8)
            ]
        )

    def grads(fn):
        return jax.jit(jax.grad(lambda r, w: jnp.sum(jnp.sin(fn(r, w, sizes))), argnums=(0, 1)))

    for actual, expected in zip(
        grads(sharded)(rows, weights), grads(plain)(rows, weights), strict=True
    ):
        assert relative_rms(actual, expected) <= 1e-6


def test_memory_is_a_tenth_of_ragged_dot():
    shapes = [(4096, 256), (64, 256, 256)]
    rows, weights = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    sizes = jax.ShapeDtypeStruct((64,), jnp.int32)

    def temp_bytes(fn):
        compiled = jax.jit(fn).lower(rows, weights, sizes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def gradient(fn):
        return jax.grad(lambda r, w, s: jnp.sum(fn(r, w, s) ** 2), argnums=(0, 1))

    ragged = jax.lax.ragged_dot
    assert temp_bytes(grouped_matmul) <= temp_bytes(ragged) / 10
    assert temp_bytes(gradient(grouped_matmul)) <= temp_bytes(gradient(ragged)) / 6


def test_frozen_weights_cost_no_weight_gradient():
    rows, weights, sizes = specs.make_inputs(specs.CASES["large_odd"])

    def d_rows(rows, weights):
        return jax.grad(lambda r: jnp.sum(grouped_matmul(r, weights, sizes) ** 2))(rows)

    text = jax.jit(d_rows).lower(rows, weights).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    # the backward loop carries [R, K]; with dW it would carry a second [E, K, F]
    assert len(loops) == 2
    assert all(line.split(" while(")[0].count("f32[5,16,24]") <= 1 for line in loops)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": jnp.ones(1)}, NotImplementedError, "MXFP4"),
        ({"lora": jnp.ones(1)}, NotImplementedError, "low-rank"),
        ({"activation": "gelu"}, ValueError, "situ, swiglu"),
        ({"weights": jnp.ones((2, 4, 3)), "activation": "situ"}, ValueError, "halve"),
        ({"weights": jnp.ones((3, 4, 6))}, ValueError, "disagree"),
        ({"weights": jnp.ones((2, 5, 6))}, ValueError, "disagree"),
    ],
)
def test_refusals(change, error, message):
    rows, sizes = jnp.ones((3, 4)), jnp.array([1, 2])
    arguments = {"rows": rows, "weights": jnp.ones((2, 4, 6)), "group_sizes": sizes} | change
    with pytest.raises(error, match=message):
        grouped_matmul(**arguments)
