"""Sparse MLA attention: blockwise against dense, invariants, sharding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import blocks
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.sparse_flash_attention import (
    sparse_flash_attention,
    sparse_max_logit,
    specs,
)
from pallas_kernels.testing import assert_close, compare, output_and_vjp, relative_rms

SPARSE = jax.jit(sparse_flash_attention, static_argnames=("scale", "impl"))
RUNS = [(name, "float32") for name in specs.CASES]
RUNS += [("odd63", "bfloat16"), ("later_queries", "bfloat16")]


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
    deterministic = name in ("odd63", "three_blocks")
    op = functools.partial(sparse_flash_attention, impl="chunked", deterministic=deterministic)
    ref = functools.partial(sparse_flash_attention, impl="ref")
    errors = compare(_bounded(op), _bounded(ref), inputs, floor=1e-3, **case.options())
    assert_close(errors, specs.TOLERANCE[dtype])


@pytest.mark.parametrize(("impl", "name"), [("chunked", "three_blocks"), ("pallas_gpu", "heads")])
def test_deterministic_gradients_repeat_and_the_others_are_within_1e_6(impl, name):
    """The first have a fixed order of sums; others, scattered or atomic, differ by theirs alone."""
    case = (specs.CASES | specs.KERNEL_CASES)[name]
    x = case.inputs()
    floats = {key: a for key, a in x.items() if key != "indices"}

    def gradients(deterministic):
        def run(floats, indices, cotangents):
            op = functools.partial(
                sparse_flash_attention, indices=indices, scale=0.3, impl=impl,
                deterministic=deterministic,
            )  # fmt: skip
            return jax.vjp(lambda floats: op(**floats), floats)[1](cotangents)[0]

        fast = {"xla_backend_optimization_level": 0}
        return jax.jit(run, compiler_options=fast)

    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(functools.partial(sparse_flash_attention, scale=0.3), **x)
    cotangents = jax.tree.map(
        lambda o: jnp.asarray(rng.standard_normal(o.shape).astype(np.float32)), shapes
    )
    fixed = gradients(True)
    first, again = (fixed(floats, x["indices"], cotangents) for _ in range(2))
    free = gradients(False)(floats, x["indices"], cotangents)
    for key, grad in first.items():
        np.testing.assert_array_equal(grad, again[key])
        assert relative_rms(free[key], grad) <= 1e-6, key


def _expanded(q_content, q_rope, latent, k_rope, w_uk, w_uv):
    """Dense MLA from the same tensors, keys and values expanded per head."""
    k = jnp.einsum("bsc,cnh->bsnh", latent, w_uk)
    shared = jnp.broadcast_to(k_rope[:, :, None], (*k.shape[:3], k_rope.shape[-1]))
    q, k = jnp.concatenate([q_content, q_rope], -1), jnp.concatenate([k, shared], -1)
    return mla_attention(q, k, jnp.einsum("bsc,cnh->bsnh", latent, w_uv), scale=0.3)


def _absorbed(q_content, q_rope, latent, k_rope, w_uk, w_uv, *, indices):
    q_latent = jnp.einsum("btnh,cnh->btnc", q_content, w_uk)
    out, lse = sparse_flash_attention(q_latent, q_rope, latent, k_rope, indices, scale=0.3)
    return jnp.einsum("btnc,cnh->btnh", out, w_uv), lse


def test_all_keys_chosen_is_dense_expanded_attention():
    """D1 and D2, values and every gradient, in float64."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        B, T, N, C, R, H, h = 2, 70, 3, 8, 4, 6, 5
        shapes = {
            "q_content": (B, T, N, H),
            "q_rope": (B, T, N, R),
            "latent": (B, T, C),
            "k_rope": (B, T, R),
            "w_uk": (C, N, H),
            "w_uv": (C, N, h),
        }
        inputs = {name: jnp.asarray(rng.standard_normal(s)) for name, s in shapes.items()}
        q_idx, k_idx = (jnp.asarray(rng.standard_normal(s)) for s in ((B, T, 2, 4), (B, T, 4)))
        indices = lightning_indexer(q_idx, k_idx, jnp.ones((B, T, 2)), top_k=T + 3)
        absorbed = functools.partial(_absorbed, indices=indices)
        errors = compare(absorbed, _expanded, inputs)
        assert_close(errors, 1e-12)


def test_first_query_and_no_key():
    """D5: query 0 sees itself alone. No key: output 0, lse 1e30, no gradient."""
    inputs = specs.CASES["odd63"].inputs()
    out, lse = SPARSE(**inputs, scale=0.3)
    latent = inputs["latent"][:, :1, None]
    np.testing.assert_allclose(out[:, :1], np.broadcast_to(latent, out[:, :1].shape), atol=1e-6)
    assert (out[:, 61:] == 0).all() and (lse[:, 61:] == 1e30).all()
    grads = output_and_vjp(sparse_flash_attention, inputs, scale=0.3)[1]
    assert (grads["q_latent"][:, 61:] == 0).all() and (grads["latent"][:, 61:] == 0).all()


def test_order_of_past_keys_is_irrelevant():
    """D9: permuting the past rows, and what the indices point to, leaves the output."""
    with jax.enable_x64(True):
        x = specs.CASES["odd65"].inputs(jnp.float64)
        order = np.append(np.random.default_rng(1).permutation(64), 64)
        place = jnp.asarray(np.argsort(order), jnp.int32)
        last = dict(x, **{name: x[name][:, -1:] for name in ("q_latent", "q_rope", "indices")})
        turned = dict(last, latent=x["latent"][:, order], k_rope=x["k_rope"][:, order])
        turned["indices"] = place[last["indices"]]
        out = SPARSE(**last, scale=0.3)[0]
        np.testing.assert_allclose(out, SPARSE(**turned, scale=0.3)[0], rtol=1e-12)


def test_max_logit():
    x = specs.CASES["three_blocks"].inputs()
    got = sparse_max_logit(**x, scale=0.3)
    np.testing.assert_allclose(got, sparse_max_logit(**x, scale=0.3, impl="ref"), rtol=1e-5)
    none = dict(x, indices=jnp.full_like(x["indices"], -1))
    assert (sparse_max_logit(**none, scale=0.3) == -jnp.inf).all()


def test_memory_is_linear():
    def temporaries(impl):
        inputs = specs.LARGE.inputs()
        floats = {name: x for name, x in inputs.items() if name != "indices"}

        def loss(floats, indices):
            return sparse_flash_attention(**floats, indices=indices, scale=0.1, impl=impl)[0].sum()

        compiled = jax.jit(jax.grad(loss)).lower(floats, inputs["indices"]).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked") * 8 < temporaries("ref")


INDEX = functools.partial(lightning_indexer, top_k=5)


def _all_ops(x, choose_keys=INDEX):
    """Every attention op once, from one dict of inputs with B leading."""
    index = {name: x[name] for name in ("q_idx", "k_idx", "w_idx")}
    main = {name: x[name] for name in ("q_latent", "q_rope", "latent", "k_rope")}
    indices = choose_keys(*index.values())
    out, lse = sparse_flash_attention(**main, indices=indices, scale=0.3)
    dense = mla_attention(x["q_latent"], x["q_latent"], x["q_rope"], scale=0.3)[0]
    kl = indexer_kl(**index, **main, lse=lse, indices=indices, scale=0.3)
    warm = indexer_kl(**index, **main, lse=lse, scale=0.3)
    return out, dense, kl, warm


def _ops_and_gradients(x, choose_keys=INDEX):
    outputs, pullback = jax.vjp(functools.partial(_all_ops, choose_keys=choose_keys), x)
    return outputs, pullback(outputs)[0]


def _sharded_inputs():
    rng = np.random.default_rng(0)
    B, T = 8, 140
    shapes = {
        "q_idx": (B, T, 2, 4),
        "k_idx": (B, T, 4),
        "w_idx": (B, T, 2),
        "q_latent": (B, T, 2, 8),
        "q_rope": (B, T, 2, 4),
        "latent": (B, T, 8),
        "k_rope": (B, T, 4),
    }
    return {name: jnp.asarray(rng.standard_normal(s), jnp.float32) for name, s in shapes.items()}


@pytest.fixture(scope="module")
def expected():
    return jax.jit(_ops_and_gradients)(_sharded_inputs())


def _assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_a_sharded_batch_needs_no_exchange(expected):
    """The indexer under shard_map (XLA would gather for its top-k), the others as they are."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x = jax.device_put(_sharded_inputs(), NamedSharding(mesh, P("data")))
    spec = {"in_specs": P("data"), "out_specs": P("data"), "check_vma": False}
    choose_keys = jax.shard_map(INDEX, mesh=mesh, **spec)
    run = functools.partial(_ops_and_gradients, choose_keys=choose_keys)
    compiled = jax.jit(run).lower(x).compile()
    text = compiled.as_text()
    for exchange in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert exchange not in text
    _assert_same(compiled(x), expected)


def test_shard_map(expected):
    four = jax.devices()[:4]
    mesh = jax.make_mesh((4,), ("data",), devices=four, axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        _ops_and_gradients, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    _assert_same(jax.jit(run)(_sharded_inputs()), expected)


def test_vmap(expected):
    halves = jax.tree.map(lambda a: a.reshape(2, 4, *a.shape[1:]), _sharded_inputs())
    got = jax.jit(jax.vmap(_ops_and_gradients))(halves)
    _assert_same(jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), got), expected)


def _tiny():
    """Four queries of three keys of six rows; row 5 is nobody's, the last query has no key."""
    inputs = specs.Case(1, 4, 6, 2, 4, 2, 3).inputs()
    indices = jnp.array([[[0, -1, 1], [1, 2, 0], [3, 4, -1], [-1, -1, -1]]])
    return inputs | {"indices": indices}


@pytest.mark.parametrize("deterministic", [True, False])
def test_nan_that_nobody_chose_reaches_nothing(deterministic):
    x = _tiny()
    rows = {name: x[name].at[:, 5].set(jnp.nan) for name in ("latent", "k_rope")}
    queries = {name: x[name].at[:, 3].set(jnp.nan) for name in ("q_latent", "q_rope")}
    run = functools.partial(
        sparse_flash_attention, scale=0.2, deterministic=deterministic, impl="chunked"
    )
    actual, expected = output_and_vjp(run, x | rows | queries), output_and_vjp(run, x)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "chunked"])
def test_indices_past_the_last_key_are_empty_slots(impl):
    """For every operator of chosen keys: they become -1 before any implementation sees them."""
    for dtype in (jnp.int8, jnp.int32):
        given = jnp.array([[[0, 5, 6, 99, -7, -1]]], dtype)
        found = blocks.check_indices("op", given, 1, 1, 6)
        assert found.tolist() == [[[0, 5, -1, -1, -1, -1]]] and found.dtype == jnp.int32
    x = _tiny()
    beyond = x | {"indices": jnp.where(x["indices"] < 0, 6, x["indices"])}
    run = functools.partial(sparse_flash_attention, scale=0.2, impl=impl)
    np.testing.assert_array_equal(run(**beyond)[0], run(**x)[0])


def test_errors_say_what_to_do():
    x = specs.CASES["odd63"].inputs()
    with pytest.raises(ValueError, match="Cast them to one dtype"):
        sparse_flash_attention(**dict(x, latent=x["latent"].astype(jnp.bfloat16)), scale=1.0)
    with pytest.raises(NotImplementedError, match="no Pallas kernel"):
        sparse_flash_attention(**x, scale=1.0, impl="pallas_tpu")
