"""kda's TPU kernels in the interpreter: against the recurrence, at borders, at extreme decays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choose, lowering, testing
from pallas_kernels.kda import kda, kda_fused, specs

quick = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
ours = functools.partial(kda_fused, impl="pallas_tpu")
reference = functools.partial(kda_fused, impl="ref")
ours_after_gates = functools.partial(kda, impl="pallas_tpu")

# As in specs.py: a gate's gradient is that of a decay. That of a_log is one number a head, summed
# from terms of both signs: four heads tell its error, one may be near 0 by chance.
GATES = ("d_gate", "d_a_log", "d_dt_bias")
TOLERANCE = {
    "float32": {"*": 2e-6, **dict.fromkeys(GATES, 1e-5)},
    "bfloat16": {
        "*": 8e-3, "out0": 5e-3, "out1": 5e-3, "d_beta_logits": 2e-2, **dict.fromkeys(GATES, 2e-2),
    },
}  # fmt: skip


def fused_inputs(case: specs.Case, seed=0):
    """Arguments of `kda_fused`, from numpy; keys are nowhere near unit length."""
    rng = np.random.default_rng(seed)
    B, T, N, H, h, Nv = case.B, case.T, case.N, case.H, case.h, case.Nv or case.N

    def normal(*shape, dtype="float32"):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    tokens = functools.partial(normal, B, T, dtype=case.dtype)
    return {
        "q": tokens(N, H), "k": tokens(N, H), "v": tokens(Nv, h), "gate": tokens(Nv, H),
        "beta_logits": tokens(Nv), "a_log": 0.3 * normal(Nv), "dt_bias": normal(Nv, H),
        "segment_ids": specs.segment_ids(case.documents, B, T) if case.documents else None,
        "initial_state": normal(B, Nv, H, h) if case.initial_state else None,
    }  # fmt: skip


def after_gates(case: specs.Case, log_decay):
    """Arguments of `kda`: unit queries and keys, the same decay everywhere or one a head."""
    x = fused_inputs(case)
    q, k = (x[n] / jnp.linalg.norm(x[n], axis=-1, keepdims=True) for n in "qk")
    decays = jnp.broadcast_to(jnp.array(log_decay, jnp.float32)[..., None], x["gate"].shape)
    beta = jax.nn.sigmoid(x["beta_logits"])
    kept = {n: x[n] for n in ("v", "segment_ids", "initial_state")}
    return {"q": q, "k": k, "log_decay": decays, "beta": beta, **kept}


def in_float64(inputs):
    return {
        name: a if a is None or a.dtype.kind == "i" else jnp.asarray(np.asarray(a, np.float64))
        for name, a in inputs.items()
    }


# ---- against the recurrence

PACKED = (5, 59, 1, 64, 20)
SIZES = {
    "1": (specs.Case(2, 1, 1, 16, 8, initial_state=True), -5),
    "63": (specs.Case(1, 63, 4, 16, 8, dtype="bfloat16", initial_state=True), None),
    "64": (specs.Case(1, 64, 1, 16, 8, documents=(1, 62, 1)), None),
    "65 grouped": (specs.Case(1, 65, 1, 16, 8, Nv=2, initial_state=True), -5),
    "257 packed": (specs.Case(1, 257, 1, 16, 8, documents=PACKED, initial_state=True), None),
    "257 low": (specs.Case(1, 257, 4, 16, 8, documents=PACKED, chunk=32, dtype="bfloat16"), -5),
}
LONG = {
    f"{dtype} {bound}": (specs.Case(2, 1000, 4, 16, 8, documents=(300, 1, 450), dtype=dtype), bound)
    for dtype in TOLERANCE
    for bound in (-5, None)
}


@pytest.mark.parametrize("name", SIZES)
def test_equals_the_recurrence(name):
    case, bound = SIZES[name]
    errors = testing.compare(
        ours, reference, fused_inputs(case), lower_bound=bound, chunk=case.chunk
    )
    testing.assert_close(errors, TOLERANCE[case.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64, 128])
@pytest.mark.parametrize("name", LONG)
def test_long_rows_equal_the_recurrence(name, chunk):
    case, bound = LONG[name]
    errors = testing.compare(ours, reference, fused_inputs(case), lower_bound=bound, chunk=chunk)
    testing.assert_close(errors, TOLERANCE[case.dtype])


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, case in specs.CASES.items() if case.chunk >= 16])
def test_after_the_gates_equals_the_recurrence(name):
    case = specs.CASES[name]
    reference = functools.partial(kda, impl="ref")
    inputs = specs.make_inputs(case)
    errors = testing.compare(ours_after_gates, reference, inputs, chunk=case.chunk)
    testing.assert_close(errors, specs.TOLERANCE[case.dtype])


def test_fast_decay_everywhere():
    """Against float64; where exp(g_1 + ... + g_t) is written as a quotient, it is 0 / 0."""
    inputs = after_gates(specs.Case(1, 70, 2, 16, 8, initial_state=True), [-5.0, -20.0])
    with jax.enable_x64(True):
        exact = in_float64(inputs)
        wanted, wanted_grads = testing.output_and_vjp(functools.partial(kda, impl="ref"), exact)
    got, grads = testing.output_and_vjp(ours_after_gates, inputs)
    for head in (0, 1):
        assert testing.relative_rms(got[0][:, :, head], wanted[0][:, :, head]) < 1e-6
        for name in ("q", "k", "v", "beta", "log_decay"):
            a, b = grads[name][:, :, head], wanted_grads[name][:, :, head]
            assert testing.relative_rms(a, b) < 1e-5, name


def test_softplus_gate_at_minus_20():
    inputs = fused_inputs(specs.Case(1, 40, 1, 16, 8, initial_state=True))
    inputs["gate"], inputs["a_log"] = 20 + inputs["gate"], jnp.zeros(1)
    got, wanted = quick(functools.partial(ours, chunk=16))(**inputs), quick(reference)(**inputs)
    for a, b in zip(got, wanted, strict=True):
        assert testing.relative_rms(a, b) < 2e-6


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_similar_keys(noise):
    """Powers of the triangle reach 5e17 here, its inverse stays below 1."""
    inputs = after_gates(specs.Case(1, 128, 1, 32, 8), [0.0])
    k = 0.9 * inputs["k"][:, :1] + noise * inputs["k"]
    inputs["k"] = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    inputs["beta"] = jnp.ones_like(inputs["beta"])
    with jax.enable_x64(True):
        expected, _ = quick(functools.partial(kda, impl="ref"))(**in_float64(inputs))
    assert testing.relative_rms(quick(ours_after_gates)(**inputs)[0], expected) < 1e-5


# ---- what must not reach what


@functools.cache
def gradients_of(bound, chunk):
    """Output and gradients along T of a loss with its weights; one program for several tests."""

    def loss(floats, weights, segment_ids):
        out, _ = ours(**floats, segment_ids=segment_ids, lower_bound=bound, chunk=chunk)
        return jnp.sum(out * weights), out

    return quick(jax.grad(loss, has_aux=True))


def along_rows(inputs, weights, bound=-5, chunk=32):
    floats = {n: a for n, a in inputs.items() if n not in ("segment_ids", "initial_state")}
    grads, out = gradients_of(bound, chunk)(floats, weights, inputs["segment_ids"])
    return {"out": out, **{n: grads[n] for n in ("q", "k", "v", "gate", "beta_logits")}}, grads


BORDERS = specs.Case(1, 100, 2, 16, 8, documents=(37, 40))  # and 23 rows of padding
WEIGHTS = jnp.cos(jnp.arange(1600.0)).reshape(1, 100, 2, 8)


def test_documents_and_padding_keep_to_themselves():
    inputs = fused_inputs(BORDERS)
    padding = (inputs["segment_ids"] == 0)[..., None, None]
    before, small = along_rows(inputs, jnp.where(padding, 0, WEIGHTS))

    def spoilt(a):
        a = a.at[:, 77:].set(jnp.nan)
        return a.at[:, :37].mul(0.7)

    names = ("q", "k", "v", "gate", "beta_logits")
    changed = {**inputs, **{n: spoilt(inputs[n]) for n in names}}
    after, _ = along_rows(changed, jnp.where(padding, 0, WEIGHTS))
    for name, a in before.items():
        assert (a[:, :37] != after[name][:, :37]).any(), name
        np.testing.assert_array_equal(a[:, 37:77], after[name][:, 37:77], err_msg=name)
        np.testing.assert_array_equal(after[name][:, 77:], 0, err_msg=name)
    poisoned = {**inputs, **{n: inputs[n].at[:, 77:].set(jnp.nan) for n in names}}
    _, same = along_rows(poisoned, WEIGHTS.at[:, 77:].set(jnp.nan))
    for name in ("a_log", "dt_bias"):
        np.testing.assert_array_equal(small[name], same[name], err_msg=name)


@pytest.mark.parametrize("cut", [5, 32, 77])
def test_later_positions_leave_earlier_ones_bit_equal(cut):
    inputs = {**fused_inputs(BORDERS), "segment_ids": jnp.ones((1, 100), jnp.int32)}
    weights = WEIGHTS.at[:, cut:].set(0)
    before, _ = along_rows(inputs, weights)
    names = ("q", "k", "v", "gate", "beta_logits")
    changed = {**inputs, **{n: inputs[n].at[:, cut:].mul(0.5) for n in names}}
    for name, a in along_rows(changed, weights)[0].items():
        np.testing.assert_array_equal(a[:, :cut], before[name][:, :cut], err_msg=name)


def test_padding_does_not_write_or_decay():
    inputs = fused_inputs(specs.Case(1, 40, 1, 16, 8, initial_state=True))
    inputs["segment_ids"] = jnp.zeros((1, 40), jnp.int32)
    _, state = quick(functools.partial(ours, chunk=16))(**inputs)
    np.testing.assert_array_equal(state, inputs["initial_state"])


# ---- the transition, transformations, the choice


def test_transition_is_how_the_row_acts_on_its_entry_state():
    inputs = fused_inputs(specs.Case(1, 40, 2, 16, 8, initial_state=True))
    got, wanted = (
        quick(functools.partial(fn, chunk=16, return_transition=True))(**inputs)
        for fn in (ours, reference)
    )
    for a, b in zip(got, wanted, strict=True):
        assert testing.relative_rms(a, b) < 2e-6


def test_under_vmap_in_shard_map():
    inputs = fused_inputs(specs.Case(8, 20, 1, 16, 8, documents=(7, 9)))
    weights = {n: inputs.pop(n) for n in ("a_log", "dt_bias")}
    inputs.pop("initial_state")

    def loss(rows, segment_ids):
        out, state = ours(**rows, **weights, segment_ids=segment_ids, chunk=16)
        return jnp.sum(jnp.sin(out)) + jnp.sum(state**2)

    segments = inputs.pop("segment_ids")
    expected = quick(jax.grad(loss))(inputs, segments)
    rows = jax.tree.map(lambda a: a.reshape(4, 2, 1, *a.shape[1:]), (inputs, segments))
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("rows")
    mapped = jax.vmap(jax.vmap(jax.grad(loss)))
    sharded = quick(
        jax.shard_map(mapped, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )(*rows)
    for name, a in expected.items():
        np.testing.assert_allclose(sharded[name].reshape(a.shape), a, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"v": jnp.zeros((1, 16, 1, 8), jnp.bfloat16)}, "not all bfloat16 or all float32"),
        ({"q": jnp.zeros((1, 16, 1, 16), jnp.float16)}, "float16"),
        ({"chunk": 8}, "chunk=8"),
    ],
)
def test_what_it_refuses(change, reason):
    inputs = fused_inputs(specs.Case(1, 16, 1, 16, 8))
    with pytest.raises(NotImplementedError, match=reason):
        ours(**{**inputs, **change})


def test_it_is_chosen_on_a_tpu():
    def chosen(case):
        with choose.lowering_for("tpu"), choose.recording() as choices:
            jax.eval_shape(lambda x: kda_fused(**x), fused_inputs(case))
        (choice,) = choices["kda.kda_fused"]
        return choice

    assert chosen(specs.Case(1, 70, 1, 128, 128)).impl == "pallas_tpu"
    narrow = chosen(specs.Case(1, 70, 1, 96, 128))
    assert narrow.impl == "chunked"
    assert dict(narrow.refused)["pallas_tpu"] == "head widths (96, 128) are not multiples of 128"


def test_the_softplus_form_lowers_at_real_sizes():
    """The bounded form is among the quick cases that test_lowering.py has."""
    cases = [case for case in specs.gate_cases("tpu") if case.name.endswith("kimi_linear")]
    for case, kernel in zip(cases, ("kda_forward", "kda_backward"), strict=True):
        assert kernel in lowering.lowered(case.fn, case.args, "tpu")


@pytest.mark.slow
def test_on_simulated_memory():
    """The interpreter that has a TPU's memories and copies: out-of-bounds and unwritten reads."""
    inputs = fused_inputs(specs.Case(1, 20, 1, 128, 128, documents=(7, 9)))
    fn = functools.partial(kda_fused, chunk=16)
    expected = testing.output_and_vjp(functools.partial(fn, impl="chunked"), inputs)
    with choose.lowering_for("tpu"), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        got = testing.output_and_vjp(functools.partial(fn, impl="pallas_tpu"), inputs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert testing.relative_rms(a, b) < 1e-5
