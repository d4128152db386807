"""kda: every implementation against the recurrence, golden numbers, invariants."""

import functools

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from pallas_kernels import testing
from pallas_kernels.kda import gates, kda, kda_fused, specs

IMPLS = ("chunked", "ref")

# compiled in a third of the time; tests of bits and memory use what ships
quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
_OPTIONS = ("scale", "chunk", "impl")
run = quick(kda, static_argnames=_OPTIONS)
run_fused = quick(kda_fused, static_argnames=(*_OPTIONS, "return_transition"))
reference = functools.partial(kda, impl="ref")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def in_float64(inputs):
    wide = {
        name: a if a is None or a.dtype.kind == "i" else np.asarray(a, np.float64)
        for name, a in inputs.items()
    }
    wide["k"] = wide["k"] / np.linalg.norm(wide["k"], axis=-1, keepdims=True)
    return wide


def as_jax(inputs):
    return {name: None if a is None else jnp.asarray(a) for name, a in inputs.items()}


# ---- the chunked form against the recurrence (also K4)


# Cases that between them have every size, border, layout and dtype; the others are slow.
FEW = ("tiny", "past_chunk", "packed", "packed_odd", "grouped", "fast_decay", "low_precision")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in specs.CASES],
)
def test_chunked_equals_recurrence(name):
    case = specs.CASES[name]
    inputs = specs.make_inputs(case)
    errors = testing.compare(kda, reference, inputs, chunk=case.chunk)
    limits = dict(specs.TOLERANCE[case.dtype])
    if case.log_decay < -10:
        limits["d_log_decay"] = limits["d_initial_state"] = 1e-4  # gradients of 1e-5 and less
    testing.assert_close(errors, limits)


@pytest.mark.parametrize(
    "chunk",
    [pytest.param(c, marks=[] if c in (1, 64) else pytest.mark.slow) for c in (1, 4, 16, 64, 128)],
)
def test_every_chunk_in_float64(x64, chunk):
    case = specs.Case(1, 70, 1, 8, 4, documents=(3, 40, 20), initial_state=True)
    inputs = in_float64(specs.make_inputs(case))
    testing.assert_close(testing.compare(kda, reference, inputs, chunk=chunk), 1e-12)


# ---- golden numbers


def golden_inputs():
    t, i, j = np.arange(6.0)[:, None], np.arange(4.0), np.arange(3.0)
    q, k = np.sin(1 + t + 2 * i), np.cos(2 + 3 * t + i)
    inputs = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": np.sin(1 + t * j),
        "log_decay": -0.1 * (1 + t + i),
        "beta": 1 / (1 + np.exp(-(t[:, 0] - 2) / 2)),
    }
    return {name: jnp.asarray(a[None, :, None]) for name, a in inputs.items()}


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_six_positions(x64, impl):
    inputs = golden_inputs()
    out, state = run(**inputs, impl=impl)
    np.testing.assert_allclose(out[0, 0, 0], [0.019683935] * 3, atol=1e-9)
    np.testing.assert_allclose(out[0, 5, 0], [-0.019342892, 0.016327332, 0.010374231], atol=1e-9)
    np.testing.assert_allclose(jnp.linalg.norm(state), 1.071168304, atol=1e-9)
    np.testing.assert_allclose(jnp.sum(out), 0.019643075, atol=1e-9)

    def half_square(inputs):
        return 0.5 * jnp.sum(kda(**inputs, impl=impl)[0] ** 2)

    value, grads = quick(jax.value_and_grad(half_square))(inputs)
    np.testing.assert_allclose(value, 0.026718083, atol=1e-9)
    norms = [jnp.linalg.norm(grads[n]) for n in ("q", "k", "v", "log_decay", "beta")]
    wanted = [0.092125297, 0.118437076, 0.025282296, 0.007728219, 0.059507709]
    np.testing.assert_allclose(norms, wanted, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_document_border(x64, impl):
    segments = jnp.array([[1, 1, 2, 2, 2, 2]], jnp.int32)
    out, _ = run(**golden_inputs(), segment_ids=segments, impl=impl)
    np.testing.assert_allclose(out[0, 5, 0], [-0.020681236, 0.014786395, 0.011127792], atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_scalar_and_two_keys(impl):
    one = jnp.ones((1, 5, 1, 1))
    out, _ = run(one, one, one, jnp.log(0.5) * one, 0.5 * one[..., 0], impl=impl)
    t = np.arange(1, 6)
    np.testing.assert_allclose(out[0, :, 0, 0], (1 - 0.25**t) * 2 / 3, rtol=1e-6)

    k = jnp.array([[1.0, 0.0], [0.6, 0.8]]).reshape(1, 2, 1, 2)
    v = jnp.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    out, state = run(k, k, v, jnp.zeros_like(k), jnp.ones((1, 2, 1)), scale=1.0, impl=impl)
    np.testing.assert_allclose(state.ravel(), [1.84, 1.12], rtol=1e-6)
    np.testing.assert_allclose(out.ravel(), [1.0, 2.0], rtol=1e-6)


# ---- packed documents (K6)

DOCUMENTS = (1, 63, 64, 65, 30)


def outputs_and_grads(inputs, **options):
    """Output and every gradient along T, of the loss sum(out * cos(position))."""

    def loss(floats, segment_ids):
        out, _ = kda(**floats, segment_ids=segment_ids, **options)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size).reshape(out.shape))), out

    floats = {n: a for n, a in inputs.items() if n not in ("segment_ids", "initial_state")}
    grad = jax.jit(jax.grad(loss, has_aux=True))
    grads, out = grad(floats, inputs["segment_ids"])
    return {"out": out, **grads}


@pytest.mark.parametrize("impl", IMPLS)
def test_packed_equals_alone(x64, impl):
    case = specs.Case(1, 230, 2, 8, 4, documents=DOCUMENTS)
    inputs = as_jax(in_float64(specs.make_inputs(case)))
    weights = jnp.cos(jnp.arange(230.0 * 2 * 4).reshape(1, 230, 2, 4))

    def run_one(inputs, weights):
        def loss(floats):
            out, _ = kda(**floats, segment_ids=inputs["segment_ids"], impl=impl)
            return jnp.sum(out * weights), out

        names = ("q", "k", "v", "log_decay", "beta")
        grads, out = quick(jax.grad(loss, has_aux=True))({n: inputs[n] for n in names})
        return {"out": out, **grads}

    packed = run_one(inputs, weights)
    start = 0
    for length in DOCUMENTS:
        part = slice(start, start + length)
        alone = {n: a if a is None else a[:, part] for n, a in inputs.items()}
        alone["segment_ids"] = None
        for name, expected in run_one(alone, weights[:, part]).items():
            assert testing.relative_rms(packed[name][:, part], expected) < 1e-12, name
        start += length
    for name, a in packed.items():
        if name in ("log_decay", "beta"):
            np.testing.assert_array_equal(a[:, start:], 0)


def test_other_documents_keep_their_bits():
    inputs = specs.make_inputs(specs.Case(2, 150, 2, 16, 8, documents=(37, 70, 40)))
    before = outputs_and_grads(inputs)
    changed = {
        n: a if n in ("segment_ids", "initial_state") else a.at[:, :37].mul(-0.7) if n in "qkv"
        else a.at[:, :37].mul(0.31)
        for n, a in inputs.items()
    }  # fmt: skip
    after = outputs_and_grads(changed)
    for name in before:
        assert (before[name][:, :37] != after[name][:, :37]).any(), name
        np.testing.assert_array_equal(before[name][:, 37:], after[name][:, 37:], err_msg=name)


def test_padding_does_not_write_or_decay():
    inputs = specs.make_inputs(specs.CASES["past_chunk"])
    start = inputs["initial_state"]
    inputs["segment_ids"] = jnp.zeros((1, 65), jnp.int32)
    _, state = run(**inputs)
    np.testing.assert_array_equal(state, start)


SPOILT = {
    "kda": ("q", "k", "v", "log_decay", "beta"),
    "kda_fused": ("q", "k", "v", "gate", "beta_logits"),
}


@pytest.mark.parametrize(
    "op, impl",
    [
        ("kda", "chunked"), ("kda", "ref"), ("kda_fused", "chunked"), ("kda_fused", "ref"),
        ("kda_fused", "pallas_gpu"), ("kda_fused", "pallas_tpu"),
        pytest.param("kda", "pallas_gpu", marks=pytest.mark.slow),
        pytest.param("kda", "pallas_tpu", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_nan_in_padding_reaches_nothing(op, impl):
    """Padding in front, between documents and at the end, in inputs and in the cotangent."""
    inputs = specs.make_inputs(specs.Case(2, 24, 1, 16, 16, initial_state=True))
    if op == "kda_fused":
        inputs |= {"gate": inputs.pop("log_decay"), "beta_logits": inputs.pop("beta")}
        inputs |= {"a_log": jnp.array([0.1]), "dt_bias": jnp.ones((1, 16))}
    inputs.pop("segment_ids")
    rows = [0] * 3 + [1] * 7 + [0] * 2 + [2] * 8 + [0] * 4, [1] * 10 + [0] * 6 + [2] * 8
    segments = jnp.array(rows, jnp.int32)
    fn = {"kda": kda, "kda_fused": kda_fused}[op]

    @quick
    def results(inputs, d_out):
        run = lambda a: fn(**a, segment_ids=segments, impl=impl, chunk=16)  # noqa: E731
        (out, state), pullback = jax.vjp(run, inputs)
        return {"out": out, "state": state, **pullback((d_out, jnp.cos(state)))[0]}

    padding = (segments == 0)[..., None, None]
    spoil = lambda a: jnp.where(padding[..., 0] if a.ndim == 3 else padding, jnp.nan, a)  # noqa: E731
    d_out = jnp.cos(jnp.arange(768.0)).reshape(2, 24, 1, 16)
    clean = results(inputs, d_out)
    spoilt = {**inputs, **{n: spoil(inputs[n]) for n in SPOILT[op]}}
    for name, a in results(spoilt, spoil(d_out)).items():
        assert jnp.isfinite(a).all() and jnp.any(a), name
        np.testing.assert_array_equal(a, clean[name], err_msg=name)
        if name in ("out", *SPOILT[op]):
            np.testing.assert_array_equal(a[segments == 0], 0, err_msg=name)


def test_later_positions_leave_earlier_ones_bit_equal():
    inputs = specs.make_inputs(specs.Case(1, 100, 2, 16, 8, log_decay=-3.0))
    out, _ = run(**inputs)
    for cut in (5, 20, 64, 77):
        changed = {n: a if a is None else a.at[:, cut:].mul(0.5) for n, a in inputs.items()}
        later, _ = run(**changed)
        np.testing.assert_array_equal(out[:, :cut], later[:, :cut])


# ---- invariants


def test_k1_delta_rule_recalls_what_it_wrote(x64):
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(1, 70, 1, 16, 4, log_decay=0.0))))
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    for t in (17, 70):
        part = {n: None if a is None else a[:, :t] for n, a in inputs.items()}
        _, state = run(**part)
        read = jnp.einsum("bnij,bni->bnj", state, inputs["k"][:, t - 1])
        np.testing.assert_allclose(read, inputs["v"][:, t - 1], atol=1e-12)


def test_k2_without_writing_the_state_decays(x64):
    inputs = as_jax(in_float64(specs.make_inputs(specs.CASES["past_chunk"])))
    inputs["beta"] = jnp.zeros_like(inputs["beta"])
    _, state = run(**inputs)
    decay = jnp.exp(inputs["log_decay"].sum(1))[..., None]
    np.testing.assert_allclose(state, decay * inputs["initial_state"], rtol=1e-12)
    other = {**inputs, "v": 5.0 * inputs["v"]}
    np.testing.assert_array_equal(run(**inputs)[0], run(**other)[0])


def test_k3_one_decay_for_all_channels_is_gated_deltanet(x64):
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(1, 70, 1, 6, 4))))
    inputs["log_decay"] = jnp.broadcast_to(inputs["log_decay"][..., :1], (1, 70, 1, 6))
    out, _ = run(**inputs)
    q, k, v = (np.asarray(inputs[n])[0, :, 0] for n in "qkv")
    decay = np.exp(np.asarray(inputs["log_decay"]))[0, :, 0, 0]
    beta, state = np.asarray(inputs["beta"])[0, :, 0], np.zeros((6, 4))
    for t in range(70):
        state = decay[t] * (np.eye(6) - beta[t] * np.outer(k[t], k[t])) @ state
        state += beta[t] * np.outer(k[t], v[t])
        np.testing.assert_allclose(out[0, t, 0], state.T @ q[t] * 6**-0.5, atol=1e-12)


def test_k3_distinct_basis_keys_never_erase(x64):
    T = 12
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(1, T, 1, T, 4))))
    inputs["k"] = jnp.eye(T)[None, :, None]
    out, _ = run(**inputs)
    q, g, v, beta = (np.asarray(inputs[n])[0, :, 0] for n in ("q", "log_decay", "v", "beta"))
    total = np.cumsum(g, 0)
    for t in range(T):
        scores = [q[t, j] * np.exp(total[t, j] - total[j, j]) for j in range(t + 1)]
        expected = (np.array(scores) * beta[: t + 1]) @ v[: t + 1] * T**-0.5
        np.testing.assert_allclose(out[0, t, 0], expected, atol=1e-12)


@pytest.mark.parametrize("cut", [1, 30, 64, 99])
def test_k5_two_runs_with_carried_state_equal_one(x64, cut):
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(2, 100, 1, 8, 4))))
    whole, final = run(**inputs)
    first = {n: None if a is None else a[:, :cut] for n, a in inputs.items()}
    second = {n: None if a is None else a[:, cut:] for n, a in inputs.items()}
    out_1, state = run(**first)
    out_2, last = run(**{**second, "initial_state": state})
    np.testing.assert_allclose(jnp.concatenate([out_1, out_2], 1), whole, atol=1e-13)
    np.testing.assert_allclose(last, final, atol=1e-13)


def test_k8_bounded_gate(x64):
    gate = jnp.linspace(-20.0, 20.0, 41)[None, :, None, None] * jnp.ones((3, 1))
    a_log, bias = jnp.array([0.0, 0.7, 1.4]), jnp.array([[0.3], [-1.0], [2.0]])
    g = gates.log_decay(jnp.clip(gate, -4, 4), a_log, bias, -5.0)
    assert (g > -5).all() and (g < 0).all()
    np.testing.assert_allclose(gates.log_decay(-bias[None, None], a_log, bias, -5.0), -2.5)
    dt = jnp.array([1e-3, 0.05, 0.1])
    start = gates.log_decay(
        jnp.zeros((1, 1, 1, 3)), jnp.zeros(1), jnp.log(jnp.expm1(dt))[None], -5.0
    )
    np.testing.assert_allclose(start[0, 0, 0], -5 * (1 - jnp.exp(-dt)), rtol=1e-12)
    softplus = gates.log_decay(gate, a_log, bias, None)
    np.testing.assert_allclose(softplus, -jnp.exp(a_log)[:, None] * jnp.logaddexp(0, gate + bias))


def test_k9_the_state_grows_by_what_is_written_at_most(x64):
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(1, 40, 2, 8, 4, log_decay=-0.01))))
    step = quick(reference)
    state, norms = jnp.zeros((1, 2, 8, 4)), [jnp.zeros((1, 2))]
    for t in range(40):
        now = {n: None if a is None else a[:, t : t + 1] for n, a in inputs.items()}
        _, state = step(**{**now, "initial_state": state})
        norms.append(jnp.linalg.norm(state, axis=(-2, -1)))
    written = inputs["beta"] * jnp.linalg.norm(inputs["v"], axis=-1)
    growth = jnp.stack(norms[1:], 1) - jnp.stack(norms[:-1], 1)
    assert (growth <= written + 1e-12).all()


@pytest.mark.parametrize("log_decay", [-5.0, -60.0])
def test_k10_extreme_decay_stays_finite_and_exact(log_decay):
    inputs = specs.make_inputs(specs.Case(1, 4096, 1, 8, 4, initial_state=True))
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], log_decay)
    (out, state), grads = testing.output_and_vjp(kda, inputs)
    for name, a in {"out": out, "state": state, **grads}.items():
        assert jnp.isfinite(a).all(), name
    with jax.enable_x64(True):
        exact = as_jax(in_float64(inputs))
        expected, expected_state = quick(reference)(**exact)
    assert testing.relative_rms(out, expected) < 1e-6
    assert testing.relative_rms(state, expected_state) < 1e-6


@pytest.mark.parametrize("log_decay", [-0.1, -1.5, -5.0])
def test_long_rows_against_float64(log_decay):
    inputs = specs.make_inputs(specs.Case(1, 512, 1, 16, 8, log_decay=log_decay))
    with jax.enable_x64(True):
        exact = as_jax(in_float64(inputs))
        cotangents = [np.ones((1, 512, 1, 8)), np.zeros((1, 1, 16, 8))]
        wanted = testing.output_and_vjp(reference, exact, cotangents=cotangents)
    got = testing.output_and_vjp(kda, inputs, cotangents=[c.astype(np.float32) for c in cotangents])
    assert testing.relative_rms(got[0][0], wanted[0][0]) < 1e-6
    for name, grad in got[1].items():
        assert testing.relative_rms(grad, wanted[1][name]) < 1e-5, name


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_similar_keys(noise):
    """Powers of the triangle reach 5e17 here, its inverse stays below 1."""
    inputs = specs.make_inputs(specs.Case(1, 128, 1, 32, 8, log_decay=0.0))
    k = 0.9 * inputs["k"][:, :1] + noise * inputs["k"]
    inputs["k"] = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    with jax.enable_x64(True):
        expected, _ = quick(reference)(**as_jax(in_float64(inputs)))
    assert testing.relative_rms(quick(kda)(**inputs)[0], expected) < 1e-5


def test_long_memory_keeps_the_decay():
    """4096 steps of exp(-1e-6): one factor a step, rounded to float32, would be off by 1e-4."""
    inputs = specs.make_inputs(specs.Case(1, 4096, 1, 8, 4, initial_state=True))
    inputs["log_decay"] = jnp.full_like(inputs["log_decay"], -1e-6)
    inputs["beta"] = jnp.zeros_like(inputs["beta"])
    _, state = quick(kda)(**inputs)
    exact = np.exp(-4096e-6) * np.asarray(inputs["initial_state"], np.float64)
    assert testing.relative_rms(state, exact) < 5e-6


def test_k11_linear_in_values_and_queries(x64):
    inputs = as_jax(in_float64(specs.make_inputs(specs.Case(1, 70, 1, 8, 4))))
    out, _ = run(**inputs)
    for name in ("v", "q"):
        scaled, _ = run(**{**inputs, name: 3.0 * inputs[name]})
        np.testing.assert_allclose(scaled, 3 * out, rtol=1e-12)
        other = jnp.sin(inputs[name])
        total, _ = run(**{**inputs, name: inputs[name] + other})
        np.testing.assert_allclose(total, out + run(**{**inputs, name: other})[0], atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_k12_grouped_values_equal_repeated_keys(x64, impl):
    inputs = in_float64(specs.make_inputs(specs.Case(2, 70, 2, 8, 4, Nv=4)))
    repeated = {**inputs, "q": np.repeat(inputs["q"], 2, 2), "k": np.repeat(inputs["k"], 2, 2)}
    (out, state), grads = testing.output_and_vjp(kda, inputs, impl=impl)
    (out_r, state_r), grads_r = testing.output_and_vjp(kda, repeated, impl=impl)
    np.testing.assert_allclose(out, out_r, atol=1e-13)
    np.testing.assert_allclose(state, state_r, atol=1e-13)
    for name in grads:
        expected = grads_r[name]
        if name in ("q", "k"):
            expected = expected.reshape(2, 70, 2, 2, 8).sum(3)
        np.testing.assert_allclose(grads[name], expected, atol=1e-13)


# ---- the transition, transformations, sharding


def fused_inputs(T=70, seed=0):
    x = specs.make_inputs(specs.Case(2, T, 2, 8, 4), seed)
    return {
        "q": 3 * x["q"], "k": 2 * x["k"], "v": x["v"], "gate": x["log_decay"],
        "beta_logits": x["beta"], "a_log": jnp.array([0.1, 0.4]), "dt_bias": jnp.ones((2, 8)),
    }  # fmt: skip


def test_transition_is_how_the_row_acts_on_its_entry_state():
    inputs = fused_inputs()
    state = jax.random.normal(jax.random.key(3), (2, 2, 8, 4))
    plain = run_fused(**inputs, initial_state=state)
    *both, transition, exit_state = run_fused(**inputs, initial_state=state, return_transition=True)
    for a, b in zip(both, plain, strict=True):
        assert testing.relative_rms(a, b) < 1e-6
    assert testing.relative_rms(transition @ state + exit_state, plain[1]) < 1e-6
    assert testing.relative_rms(exit_state, run_fused(**inputs)[1]) < 1e-6
    segments = specs.segment_ids((30, 40), 2, 70)
    *_, transition, _ = run_fused(**inputs, segment_ids=segments, return_transition=True)
    np.testing.assert_array_equal(transition, 0)


def test_gradient_through_the_transition():
    inputs = fused_inputs(T=40)
    inputs["initial_state"] = jax.random.normal(jax.random.key(3), (2, 2, 8, 4))
    reference = functools.partial(kda_fused, impl="ref")
    options = {"return_transition": True, "lower_bound": -0.1}
    errors = testing.compare(kda_fused, reference, inputs, **options)
    testing.assert_close(errors, {"*": 2e-6, "d_gate": 2e-5, "d_dt_bias": 5e-5, "d_a_log": 2e-5})


def test_vmap_jit_and_shard_map_agree():
    inputs = specs.make_inputs(specs.Case(8, 70, 2, 8, 4, documents=(30, 35)))
    inputs.pop("initial_state")

    def loss(inputs):
        out, state = kda(**inputs)
        return jnp.sum(jnp.sin(out)) + jnp.sum(state**2), out

    def grads_and_out(inputs):
        floats = {n: a for n, a in inputs.items() if n != "segment_ids"}
        segments = inputs["segment_ids"]
        return jax.grad(lambda f: loss({**f, "segment_ids": segments}), has_aux=True)(floats)

    expected = quick(grads_and_out)(inputs)
    halves = {n: a.reshape(2, 4, *a.shape[1:]) for n, a in inputs.items()}
    mapped = quick(jax.vmap(grads_and_out))(halves)
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.P("rows")
    sharded = jax.device_put(inputs, jax.NamedSharding(mesh, rows))
    in_shards = quick(
        jax.shard_map(grads_and_out, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    )(sharded)
    compiled = jax.jit(grads_and_out).lower(sharded).compile()
    text = compiled.as_text()
    assert not any(op in text for op in ("all-gather", "all-to-all", "all-reduce", "permute("))
    for got in (
        in_shards,
        compiled(sharded),
        jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), mapped),
    ):
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            assert testing.relative_rms(a, b) < 1e-6


def test_strict_promotion(strict_promotion):
    inputs = specs.make_inputs(specs.CASES["low_precision"])
    out, state = kda(**inputs)
    assert out.dtype == jnp.bfloat16 and state.dtype == jnp.float32
    kda(**inputs, impl="ref")


def test_memory_against_the_recurrence():
    """Temporaries of the gradient at most 1/15 of those of the scan over positions."""
    case = specs.BENCHES["medium"]
    inputs = specs.make_inputs(case)
    inputs = {n: inputs[n] for n in ("q", "k", "v", "log_decay", "beta")}

    def temporaries(impl):
        def loss(inputs):
            return jnp.sum(kda(**inputs, impl=impl)[0])

        compiled = jax.jit(jax.grad(loss)).lower(inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked") <= temporaries("ref") / 15


# ---- refusals


@pytest.mark.parametrize("impl", ["pallas", "pallas_cpu"])
def test_kernels_that_do_not_exist_say_so(impl):
    with pytest.raises(NotImplementedError, match="no Pallas kernel"):
        kda(**specs.make_inputs(specs.CASES["tiny"]), impl=impl)


def test_errors_are_one_line():
    inputs = specs.make_inputs(specs.CASES["tiny"])
    for options, message in (
        ({"chunk": 48}, "power of two"), ({"impl": "fast"}, "Use one of"),
        ({"scale": float("nan")}, "scale is nan; give a finite number"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message) as error:
            kda(**inputs, **options)
        assert "\n" not in str(error.value)
    for bound in (1.0, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match="not negative|give a finite"):
            kda_fused(**fused_inputs(), lower_bound=bound)


def test_shape_errors(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    inputs = specs.make_inputs(specs.CASES["tiny"])
    for name, wrong in {
        "k": inputs["k"][:, :5], "beta": inputs["beta"][..., :1],
        "segment_ids": jnp.ones((2, 3), jnp.int32), "initial_state": jnp.ones((2, 2, 8, 9)),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=name):
            kda(**{**inputs, name: wrong})
    with pytest.raises(ValueError, match="multiple of"):
        kda(**{**inputs, "v": jnp.ones((2, 32, 3, 8))})
