"""gated_norm: its own gradient against the formula's, and what it promises."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.gated_norm import gated_norm, specs

reference = functools.partial(gated_norm, impl="ref")


@pytest.mark.parametrize("name", specs.CASES)
def test_own_gradient_equals_the_formula(name):
    case = specs.CASES[name]
    errors = testing.compare(gated_norm, reference, specs.make_inputs(case), eps=case.eps)
    testing.assert_close(errors, specs.TOLERANCE[case.dtype])


@pytest.mark.parametrize("impl", ["chunked", "ref"])
def test_golden(impl):
    """mean(x^2) = 12.5; an open gate, a half-open gate."""
    x, weight = jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0])
    y = gated_norm(x, jnp.array([[100.0, 0.0]]), weight, eps=0.0, impl=impl)
    np.testing.assert_allclose(y, [[3 / 12.5**0.5, 4 / 12.5**0.5]], rtol=1e-6)


def test_float64_exact():
    with jax.enable_x64(True):
        inputs = specs.make_inputs(specs.CASES["heads"])
        inputs = {n: a.astype(jnp.float64) for n, a in inputs.items()}
        testing.assert_close(testing.compare(gated_norm, reference, inputs, eps=1e-5), 1e-13)


def test_zero_input_has_a_finite_gradient():
    zeros = jnp.zeros((3, 8))
    for d in jax.grad(lambda *a: jnp.sum(gated_norm(*a, eps=1e-5)), (0, 1, 2))(
        zeros, zeros, jnp.ones(8)
    ):
        assert jnp.isfinite(d).all()


def test_dtypes_and_refusals(monkeypatch, strict_promotion):
    inputs = specs.make_inputs(specs.CASES["low_precision"])
    assert gated_norm(**inputs, eps=1e-5).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="negative"):
        gated_norm(**inputs, eps=-1.0)
    with pytest.raises(NotImplementedError, match="no Pallas kernel"):
        gated_norm(**inputs, eps=1e-5, impl="pallas")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="weight"):
        gated_norm(**{**inputs, "weight": jnp.ones(3)}, eps=1e-5)


def test_gradients_in_shards_equal_those_of_one_device():
    """Of the weight too, of which each shard has a share: with check_vma=False, see README.md."""
    x, gate = jnp.sin(jnp.arange(48.0)).reshape(2, 3, 8), jnp.cos(jnp.arange(48.0)).reshape(2, 3, 8)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("rows"), jax.P()
    norm = functools.partial(gated_norm, eps=1e-5)
    in_shards = jax.shard_map(
        norm, mesh=mesh, in_specs=(rows, rows, whole), out_specs=rows, check_vma=False
    )
    one, two = (
        jax.jit(jax.grad(lambda *a, fn=fn: jnp.sum(jnp.sin(fn(*a))), (0, 1, 2)))(
            x, gate, jnp.arange(8.0)
        )
        for fn in (norm, in_shards)
    )
    for a, b in zip(one, two, strict=True):
        assert testing.relative_rms(b, a) < 1e-6
