"""Indexer loss: blockwise against dense, invariants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import indexer_kl, specs
from pallas_kernels.lightning_indexer import lightning_indexer
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.sparse_flash_attention import sparse_flash_attention
from pallas_kernels.testing import assert_close, compare, output_and_vjp

KL = jax.jit(indexer_kl, static_argnames=("scale", "impl"))
INDEX, MAIN = ("q_idx", "k_idx", "w_idx"), ("q_latent", "q_rope", "latent", "k_rope")
RUNS = [(name, "float32") for name in specs.CASES]
RUNS += [("odd63", "bfloat16"), ("odd65_dense", "bfloat16")]


@functools.partial(jax.jit, static_argnums=0)
def _complete(case, x):
    """Adds indices (sparse stage) and the lse of the main attention over the same keys."""
    index, main = {n: x[n] for n in INDEX}, {n: x[n] for n in MAIN}
    top_k = case.J or case.T
    indices = lightning_indexer(**index, top_k=top_k, segment_ids=x["segment_ids"])
    lse = sparse_flash_attention(**main, indices=indices, **case.options())[1]
    return x | {"lse": lse} | ({"indices": indices} if case.J else {})


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_chunked_equals_ref(name, dtype, strict_promotion):
    case = specs.CASES[name]
    inputs = _complete(case, case.inputs(jnp.dtype(dtype)))
    op, ref = (functools.partial(indexer_kl, impl=impl) for impl in ("chunked", "ref"))
    errors = compare(op, ref, inputs, floor=1e-3, **case.options())
    assert_close(errors, specs.TOLERANCE[dtype])


@pytest.mark.parametrize("impl", ["chunked", "ref"])
def test_gradient_only_to_the_indexer(impl):
    case = specs.CASES["odd63"]
    inputs = _complete(case, case.inputs())
    grads = output_and_vjp(indexer_kl, inputs, impl=impl, **case.options())[1]
    for name, grad in grads.items():
        assert (np.abs(grad).max() > 0) == (name in INDEX), name


def _float64_inputs(case):
    return _complete(case, case.inputs(jnp.float64))


@pytest.mark.parametrize("name", ["odd63", "odd65_dense"])
def test_zero_weights_give_entropy_gap(name):
    """D7: KL >= 0, and wI = 0 makes it log |S| - entropy(p)."""
    with jax.enable_x64(True):
        case = specs.CASES[name]
        x = _float64_inputs(case)
        assert KL(**x, **case.options()).min() >= -1e-14
        kl = KL(**dict(x, w_idx=jnp.zeros_like(x["w_idx"])), **case.options())
        z = np.einsum("btnc,bsc->btns", x["q_latent"], x["latent"])
        z = case.options()["scale"] * (z + np.einsum("btnr,bsr->btns", x["q_rope"], x["k_rope"]))
        seg = np.asarray(x["segment_ids"])
        mask = (seg[:, :, None] == seg[:, None]) & (seg > 0)[..., None] & np.tri(case.T, dtype=bool)
        if case.J:
            mask = (np.asarray(x["indices"])[..., None] == np.arange(case.T)).any(2)
        weights = np.where(mask[:, :, None], np.exp(z - np.asarray(x["lse"])[..., None]), 0)
        p = weights.sum(2) / np.maximum(weights.sum((2, 3)), 1e-300)[..., None]
        entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), -1)
        expected = np.log(np.maximum(mask.sum(-1), 1)) - entropy
        np.testing.assert_allclose(kl, expected, atol=1e-12)


def test_equal_distributions_give_zero():
    """D7: one head and one indexer head with the same positive dots: KL and gradients vanish."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k = (jnp.asarray(rng.uniform(0.1, 1, s)) for s in ((2, 70, 1, 8), (2, 70, 8)))
        scale = 0.7
        w = jnp.full((2, 70, 1), scale * 8**0.5)
        inputs = {"q_idx": q, "k_idx": k, "w_idx": w, "q_latent": q, "latent": k}
        inputs |= {"q_rope": jnp.zeros((2, 70, 1, 1)), "k_rope": jnp.zeros((2, 70, 1))}
        inputs["lse"] = mla_attention(q, k[:, :, None], k[:, :, None], scale=scale)[1]
        (kl,), grads = output_and_vjp(indexer_kl, inputs, wrt=list(INDEX), scale=scale)
        assert np.abs(kl).max() < 1e-13
        assert max(np.abs(grad).max() for grad in grads.values()) < 1e-12


@pytest.mark.parametrize("name", ["odd63", "odd65_dense"])
def test_score_gradients_sum_to_zero(name):
    """D11: with one and the same index key everywhere, dw and dq are multiples of sum dI = 0."""
    with jax.enable_x64(True):
        case = specs.CASES[name]
        x = _float64_inputs(case)
        x["k_idx"] = jnp.broadcast_to(x["k_idx"][:, :1], x["k_idx"].shape)
        grads = output_and_vjp(indexer_kl, x, wrt=list(INDEX), **case.options())[1]
        assert np.abs(grads["w_idx"]).max() < 1e-13 and np.abs(grads["q_idx"]).max() < 1e-13
        assert np.abs(grads["k_idx"]).max() > 1e-3


def test_one_key_or_none_is_exactly_zero():
    case = specs.Case(2, 40, 2, 8, 4, 3, 4, 1, starts=(20,), padding=3)
    x = _complete(case, case.inputs())
    (kl,), grads = output_and_vjp(indexer_kl, x, wrt=list(INDEX), **case.options())
    assert (kl == 0).all() and all((grad == 0).all() for grad in grads.values())
    dense = KL(**{n: a for n, a in x.items() if n != "indices"}, **case.options())
    assert (dense[:, [0, 20]] == 0).all() and (dense[:, 37:] == 0).all()
    assert (dense[:, 5] > 0).all()


@pytest.mark.parametrize("impl", ["chunked", "ref"])
@pytest.mark.parametrize("sparse", [True, False])
def test_nan_in_padding_reaches_nothing(impl, sparse):
    """Nor do keys of padding in a padding query's slots; gradients of padding are 0."""
    draw = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape)  # noqa: E731
    clean = {
        "q_idx": draw(1, 5, 2, 4), "k_idx": draw(1, 5, 4), "w_idx": draw(1, 5, 2),
        "q_latent": draw(1, 5, 2, 4), "q_rope": draw(1, 5, 2, 2), "latent": draw(1, 5, 4),
        "k_rope": draw(1, 5, 2), "lse": 2 + draw(1, 5, 2),
    }  # fmt: skip
    spoilt = {name: x.at[:, 4].set(jnp.nan) for name, x in clean.items()}
    places = {"segment_ids": jnp.array([[1, 1, 1, 1, 0]])}
    if sparse:
        places["indices"] = jnp.array([[[0, -1], [1, 0], [2, 0], [1, 3], [4, 0]]])
    run = functools.partial(indexer_kl, scale=0.3, impl=impl)
    actual, expected = (output_and_vjp(run, x | places) for x in (spoilt, clean))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert all((actual[1][name][:, 4] == 0).all() for name in INDEX)


@pytest.mark.parametrize("case", [specs.LARGE, specs.LARGE_DENSE], ids=["sparse", "dense"])
def test_memory_is_linear(case):
    def temporaries(impl):
        x = case.inputs() | {"lse": jnp.zeros((case.B, case.T, case.N))}
        if case.J:
            x["indices"] = jnp.zeros((case.B, case.T, case.J), jnp.int32)
        rest = {name: a for name, a in x.items() if name not in INDEX}

        def loss(index, rest):
            return indexer_kl(**index, **rest, scale=0.2, impl=impl).sum()

        compiled = jax.jit(jax.grad(loss)).lower({n: x[n] for n in INDEX}, rest).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked") * 8 < temporaries("ref")


def test_fewer_keys_than_queries_need_documents_of_their_own():
    case = specs.CASES["odd65_dense"]
    x = _complete(case, case.inputs())
    x |= {name: x[name][:, :60] for name in ("k_idx", "latent", "k_rope")}
    with pytest.raises(ValueError, match="not 60 keys for 65 queries"):
        indexer_kl(**x, scale=1.0)
