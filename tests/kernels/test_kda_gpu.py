"""kda's GPU kernels in the interpreter: values and all gradients, both gates, borders, padding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import kda, kda_fused, specs

slow = pytest.mark.slow
kernel, reference = (functools.partial(kda_fused, impl=i) for i in ("pallas_gpu", "ref"))
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
quick_kernel = quick(kernel, static_argnames=("lower_bound", "return_transition"))

# Relative root mean square against the recurrence in float32; for bfloat16 the limits that
# flash-linear-attention tests with. It has 3e-3 for a_log, with float16, whose rounding is an
# eighth. With bfloat16 even float32 arithmetic (`chunked`) misses that, by the rounding of the
# cotangent alone: up to 8.8e-3. So a_log gets the limit of the other gradients.
FLOAT32 = {"*": 2e-6, "d_gate": 1e-5, "d_a_log": 2e-5, "d_dt_bias": 1e-5}
BFLOAT16 = {
    "*": 8e-3, "out0": 5e-3, "out1": 5e-3, "d_gate": 2e-2, "d_beta_logits": 2e-2,
}  # fmt: skip


def make(case, seed=0):
    """Arguments of `kda_fused`; queries and keys not at unit length."""
    x = specs.make_inputs(case, seed)
    Nv = case.Nv or case.N
    gate = jax.random.normal(jax.random.key(seed + 9), x["log_decay"].shape)
    return {
        "q": 3 * x["q"], "k": 2 * x["k"], "v": x["v"], "gate": gate.astype(x["q"].dtype),
        "beta_logits": x["beta"], "a_log": jnp.linspace(-0.3, 0.4, Nv),
        "dt_bias": jnp.linspace(-1.0, 1.0, Nv * case.H).reshape(Nv, case.H),
        "segment_ids": x["segment_ids"], "initial_state": x["initial_state"],
    }  # fmt: skip


SIZES = {
    "past_chunk": specs.Case(1, 65, 1, 16, 16, initial_state=True),
    "packed": specs.Case(1, 130, 1, 16, 16, documents=(5, 60, 1, 40), initial_state=True),
    "grouped": specs.Case(1, 40, 1, 64, 16, Nv=2, initial_state=True),
}
RARE = {
    "one": specs.Case(2, 1, 2, 16, 16, initial_state=True),
    "short": specs.Case(1, 63, 2, 16, 32, initial_state=True),
    "chunk": specs.Case(1, 64, 2, 32, 16),
    "odd": specs.Case(1, 257, 2, 16, 16, initial_state=True),
    "long": specs.Case(1, 1000, 1, 16, 16, documents=(63, 64, 65, 500), initial_state=True),
}


def errors_and_gradients(inputs, exact, bound):
    """Relative errors of the kernels; gradients of the recurrence at the inputs `exact`."""
    got, grads = testing.output_and_vjp(kernel, inputs, lower_bound=bound)
    with jax.enable_x64(exact["v"].dtype == np.float64):
        wanted, d = testing.output_and_vjp(reference, exact, lower_bound=bound)
    errors = {f"out{i}": testing.relative_rms(*both)
              for i, both in enumerate(zip(got, wanted, strict=True))}  # fmt: skip
    return errors | {f"d_{n}": testing.relative_rms(grads[n], d[n]) for n in d}, d


@pytest.mark.parametrize(
    "name, bound, dtype",
    [
        ("past_chunk", -5.0, "float32"), ("packed", None, "float32"),
        ("grouped", -5.0, "bfloat16"),
        *(
            pytest.param(name, bound, dtype, marks=slow)
            for name in (*RARE, "packed") for bound in (None, -5.0)
            for dtype in ("float32", "bfloat16")
            if (name, bound, dtype) != ("packed", None, "float32")
        ),
    ],
)  # fmt: skip
def test_values_and_gradients(name, bound, dtype):
    """With bfloat16, the error of a_log is that of a sum of terms of both signs, one a head.

    By chance it is near 0, and then any rounding is large beside it: a sum counts at least as much
    as one of its terms with signs at random.
    """
    case = dataclasses.replace((SIZES | RARE)[name], dtype=dtype)
    if dtype == "bfloat16":
        case = dataclasses.replace(case, N=4 // ((case.Nv or case.N) // case.N), Nv=4)
    inputs = make(case)
    exact = {n: a if a is None or a.dtype == jnp.int32 else a.astype(jnp.float32)
             for n, a in inputs.items()}  # fmt: skip
    errors, d = errors_and_gradients(inputs, exact, bound)
    if dtype == "bfloat16":
        shifted = exact["gate"] + exact["dt_bias"]
        slope = jax.nn.softplus(shifted) / jax.nn.sigmoid(shifted) if bound is None else shifted
        terms = (d["gate"] * slope).swapaxes(0, 2).reshape(4, -1)
        np.testing.assert_allclose(terms.sum(1), d["a_log"], rtol=1e-3, atol=1e-3)
        random_walk = jnp.sqrt(jnp.mean(jnp.sum(terms * terms, axis=1)))
        size = jnp.sqrt(jnp.mean(d["a_log"] ** 2))
        errors["d_a_log"] *= float(size / jnp.maximum(size, random_walk))
    testing.assert_close(errors, FLOAT32 if dtype == "float32" else BFLOAT16)


@slow
@pytest.mark.parametrize("name", ["past_chunk", "packed", "grouped"])
def test_unfused(name):
    inputs = specs.make_inputs(SIZES[name])
    fn, ref = (functools.partial(kda, impl=i) for i in ("pallas_gpu", "ref"))
    testing.assert_close(testing.compare(fn, ref, inputs), specs.TOLERANCE["float32"])


@pytest.mark.parametrize(
    "log_decay, bound",
    [(-20.0, None), pytest.param(-5.0, -5.0, marks=slow), pytest.param(-60.0, None, marks=slow)],
)
def test_steep_decays(log_decay, bound):
    """Against float64: log decays of nearly the bound everywhere, and of an unbounded gate.

    Gradients of the gate are tiny, as decays are; they have to be right all the same.
    """
    inputs = make(specs.Case(1, 70, 1, 16, 16, initial_state=True))
    inputs["a_log"], inputs["dt_bias"] = jnp.zeros(1), jnp.zeros((1, 16))
    inputs["gate"] = jnp.full_like(inputs["gate"], 12.0 if bound else -log_decay)
    exact = {n: a if a is None else np.asarray(a, np.float64) for n, a in inputs.items()}
    errors, _ = errors_and_gradients(inputs, exact, bound)
    testing.assert_close(errors, 2e-5)


@pytest.mark.parametrize("noise", [0.3, pytest.param(0.0, marks=slow)])
def test_similar_keys(noise):
    """Powers of the triangle reach 5e17 here, its inverse stays below 1."""
    inputs = make(specs.Case(1, 64, 1, 16, 16))
    inputs["k"] = 0.9 * inputs["k"][:, :1] + noise * inputs["k"]
    inputs["beta_logits"] = jnp.full_like(inputs["beta_logits"], 20.0)
    inputs["a_log"] = jnp.full_like(inputs["a_log"], -20.0)
    expected, _ = quick(reference)(**inputs)
    assert testing.relative_rms(quick_kernel(**inputs)[0], expected) < 1e-5


def test_the_future_and_padding_leave_bits_and_real_positions_alone():
    inputs = make(specs.Case(1, 130, 1, 16, 16, documents=(70, 40)))
    tokens = ("q", "k", "v", "gate", "beta_logits")

    @quick
    def prefix(inputs, upto):
        """Gradients of a loss of the first `upto` positions, and their outputs, 0 behind them."""

        def loss(floats):
            out, _ = kernel(**floats, segment_ids=inputs["segment_ids"], lower_bound=-5.0)
            out = jnp.where(jnp.arange(130)[:, None, None] < upto, out, 0)
            return jnp.sum(jnp.sin(out)), out

        floats = {n: a for n, a in inputs.items() if n not in ("segment_ids", "initial_state")}
        return jax.grad(loss, has_aux=True)(floats)

    def changed(cut, by):
        return {n: a.at[:, cut:].set(by(a[:, cut:])) if n in tokens else a
                for n, a in inputs.items()}  # fmt: skip

    grads, out = prefix(inputs, 77)
    later_grads, later = prefix(changed(77, lambda a: 0.5 * a + 1), 77)
    np.testing.assert_array_equal(out, later)
    for name in tokens:
        np.testing.assert_array_equal(grads[name][:, :77], later_grads[name][:, :77], err_msg=name)
    _, clean = prefix(inputs, 110)
    poisoned_grads, poisoned = prefix(changed(110, lambda a: jnp.full_like(a, jnp.nan)), 110)
    np.testing.assert_array_equal(poisoned, clean)
    for name, a in poisoned_grads.items():
        assert jnp.isfinite(a).all(), name


def test_transition():
    inputs = make(specs.Case(1, 70, 1, 16, 16, initial_state=True))
    options = {"lower_bound": -5.0, "return_transition": True}
    got = quick_kernel(**inputs, **options)
    wanted = quick(reference, static_argnames=tuple(options))(**inputs, **options)
    for a, b in zip(got, wanted, strict=True):
        assert testing.relative_rms(a, b) < 2e-6


def output_and_gradients(inputs):
    """Of a scalar that depends on every output, by `kernel` and jax.grad."""
    floats = {n: inputs[n] for n in ("q", "k", "v", "gate", "beta_logits", "initial_state")}

    def loss(floats):
        rest = {n: a for n, a in inputs.items() if n not in floats}
        out, state = kernel(**floats, **rest, lower_bound=-5.0)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state)), (out, state)

    grads, outputs = jax.grad(loss, has_aux=True)(floats)
    return outputs, grads


@pytest.fixture(scope="module")
def rows():
    """Two rows, their outputs and gradients."""
    inputs = make(specs.Case(2, 66, 1, 16, 16, documents=(30, 20), initial_state=True))
    return inputs, quick(output_and_gradients)(inputs)


def split(inputs, of_rows, of_weights):
    return {n: of_weights if n in ("a_log", "dt_bias") else of_rows for n in inputs}


@slow
def test_vmap(rows):
    inputs, wanted = rows
    weights = ("a_log", "dt_bias")
    mapped = {n: a if n in weights else a[:, None] for n, a in inputs.items()}
    got = quick(jax.vmap(output_and_gradients, in_axes=(split(inputs, 0, None),)))(mapped)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert testing.relative_rms(a[:, 0], b) < 1e-6


@slow
def test_shard_map(rows):
    inputs, wanted = rows
    mesh = jax.make_mesh((2,), ("rows",))
    here, everywhere = jax.P("rows"), jax.P()
    specs_of = split(inputs, here, everywhere)
    placed = {n: jax.device_put(a, jax.NamedSharding(mesh, specs_of[n]))
              for n, a in inputs.items()}  # fmt: skip
    sharded = jax.shard_map(
        output_and_gradients, mesh=mesh, in_specs=(specs_of,), out_specs=here,
        check_vma=False,
    )  # fmt: skip
    for a, b in zip(jax.tree.leaves(quick(sharded)(placed)), jax.tree.leaves(wanted), strict=True):
        assert testing.relative_rms(a, b) < 1e-6


def test_refusals():
    for case, message in (
        (specs.Case(1, 4, 1, 24, 16), "head width 24"),
        (specs.Case(1, 4, 1, 16, 24), "value width"),
        (specs.Case(1, 4, 1, 16, 16, dtype="float16"), "float16"),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=message):
            kernel(**make(case))
