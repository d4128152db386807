"""Dense MLA attention: blockwise against dense, invariants, packing, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_attention import max_logit, mla_attention, specs
from pallas_kernels.testing import assert_close, compare, output_and_vjp
from tests.kernels.attention_errors import errors, poisoned_padding

REF = functools.partial(mla_attention, impl="ref")
CHUNKED = functools.partial(mla_attention, impl="chunked")
RUNS = [(name, "float32") for name in specs.CASES]
RUNS += [("odd65_packed", "bfloat16"), ("later_queries", "bfloat16")]


def _bounded(fn):
    """The op with the lse of empty queries at -1 in place of 1e30, so that errors stay relative."""

    def run(*args, **kwargs):
        out, lse = fn(*args, **kwargs)
        return out, jnp.where(lse > 1e29, -1, lse)

    return run


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_chunked_equals_ref(name, dtype, strict_promotion):
    case = specs.CASES[name]
    inputs = case.inputs(jnp.dtype(dtype))
    if inputs["segment_ids"] is None:
        inputs.pop("segment_ids")
    errors = compare(_bounded(CHUNKED), _bounded(REF), inputs, floor=1e-3, **case.options())
    assert_close(errors, specs.TOLERANCE[dtype])


def test_packed_equals_alone_with_every_gradient():
    starts, length = (1, 64, 127), 192
    packed = specs.Case(1, length, length, 2, 8, 4, starts=starts)
    inputs = packed.inputs()
    rng = np.random.default_rng(9)
    shapes = ((1, length, 2, 4), (1, length, 2))
    cotangents = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]
    outputs, grads = output_and_vjp(mla_attention, inputs, cotangents=cotangents, scale=0.3)
    for lo, hi in zip((0, *starts), (*starts, length), strict=True):
        alone = {name: inputs[name][:, lo:hi] for name in ("q", "k", "v")}
        cut = [c[:, lo:hi] for c in cotangents]
        outputs_alone, grads_alone = output_and_vjp(mla_attention, alone, cotangents=cut, scale=0.3)
        for a, b in zip(outputs, outputs_alone, strict=True):
            np.testing.assert_allclose(a[:, lo:hi], b, atol=2e-6)
        for name, grad in grads_alone.items():
            np.testing.assert_allclose(grads[name][:, lo:hi], grad, atol=5e-6)


def test_padding_and_unseen_keys():
    inputs = specs.Case(1, 10, 10, 2, 4, 4, starts=(5,), padding=2).inputs()
    out, lse = mla_attention(**inputs, scale=0.5)
    assert (out[:, 8:] == 0).all() and (lse[:, 8:] == 1e30).all()
    np.testing.assert_allclose(out[:, 5], inputs["v"][:, 5], atol=1e-6)  # a document's first token
    grads = output_and_vjp(mla_attention, inputs, scale=0.5)[1]
    assert all((grad[:, 8:] == 0).all() for grad in grads.values())


def test_order_of_past_keys_is_irrelevant():
    """D9: without rotation, permuting s < t leaves o_t unchanged."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal((2, 40, 3, 8))) for _ in range(3))
        order = np.append(rng.permutation(39), 39)
        out = mla_attention(q, k, v, scale=0.3)[0][:, -1]
        turned = mla_attention(q, k[:, order], v[:, order], scale=0.3)[0][:, -1]
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, turned, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("length", [1, 63, 300])
def test_max_logit(length):
    case = specs.Case(2, length, length, 3, 8, 4, starts=(40,) if length > 40 else ())
    inputs = case.inputs()
    q, k, seg = inputs["q"], inputs["k"], inputs["segment_ids"]
    got = max_logit(q, k, scale=0.5, segment_ids=seg)
    scores = 0.5 * np.einsum("btnh,bsnh->bnts", q, k)
    ids = np.ones((2, length)) if seg is None else np.asarray(seg)
    mask = (ids[:, :, None] == ids[:, None]) & np.tri(length, dtype=bool)
    expected = np.where(mask[:, None], scores, -np.inf).max((0, 2, 3))
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert (max_logit(q, k, scale=0.5, segment_ids=jnp.zeros((2, length), int)) == -jnp.inf).all()
    assert (jax.grad(lambda q: max_logit(q, k, scale=0.5).sum())(q) == 0).all()


def test_clipping_by_max_logit():
    """D12's arithmetic: 400 clipped to 100 scales content by 1/2 on both sides, q_rope by 1/4."""
    inputs = specs.Case(1, 20, 20, 1, 8, 4).inputs()
    q, k = inputs["q"], inputs["k"]
    scale = 400 / float(max_logit(q, k, scale=1.0)[0])
    q_clipped = q * jnp.where(jnp.arange(8) < 5, 0.5, 0.25)
    k_clipped = k * jnp.where(jnp.arange(8) < 5, 0.5, 1.0)
    np.testing.assert_allclose(max_logit(q_clipped, k_clipped, scale=scale), [100], rtol=1e-5)


def test_memory_is_linear():
    def temporaries(impl):
        def loss(q, k, v):
            return mla_attention(q, k, v, scale=0.25, impl=impl)[0].sum()

        shape = jax.ShapeDtypeStruct((1, 1024, 4, 16), jnp.float32)
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked") * 8 < temporaries("ref")


@pytest.mark.parametrize("impl", ["chunked", "ref"])
def test_nan_in_padding_reaches_nothing(impl):
    """Values and gradients of real positions are those without it, those of padding 0."""
    case = specs.Case(1, 9, 9, 1, 4, 4, starts=(3,), padding=2)
    clean = {name: x for name, x in case.inputs().items() if x is not None}
    run = functools.partial(mla_attention, impl=impl, **case.options())
    assert_close(errors(run, run, poisoned_padding(clean), clean), 1e-6)
    grads = output_and_vjp(run, poisoned_padding(clean))[1]
    assert all((grad[:, 7:] == 0).all() for grad in grads.values())


def test_shard_map_with_jax_own_checks():
    """Loops start with sums that vary over the mesh as their operands do."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2], axis_types=auto)
    run = lambda q: CHUNKED(q, q, q, scale=0.2)[0]  # noqa: E731
    rows = jax.sharding.PartitionSpec("b")
    shared = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)
    q = jax.ShapeDtypeStruct((2, 600, 1, 4), jnp.float32)
    assert jax.eval_shape(jax.jit(shared), q).shape == (2, 600, 1, 4)
    assert jax.eval_shape(jax.jit(jax.grad(lambda q: shared(q).sum())), q).shape == q.shape


def test_errors_say_what_to_do():
    q = jnp.zeros((1, 4, 2, 8))
    seg = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="dtypes differ"):
        mla_attention(q, q.astype(jnp.bfloat16), q, scale=1.0)
    with pytest.raises(ValueError, match="Give kv_segment_ids too"):
        mla_attention(q, q[:, :3], q[:, :3], scale=1.0, segment_ids=seg)
    with pytest.raises(ValueError, match="Give both, or neither"):
        mla_attention(q, q, q, scale=1.0, kv_segment_ids=seg)
    with pytest.raises(NotImplementedError, match="head width 8 is not a multiple of 16"):
        mla_attention(q, q, q, scale=1.0, impl="pallas_gpu")
