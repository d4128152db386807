"""The indexer's TPU kernel in the interpreter, and the approximate choice with its recall."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer, recall, specs

INDEX = jax.jit(
    lightning_indexer,
    static_argnames=("top_k", "order", "approx_recall", "return_scores", "impl"),
    compiler_options={"xla_backend_optimization_level": 0},
)
TPU = functools.partial(INDEX, return_scores=True, impl="pallas_tpu")
REF = functools.partial(INDEX, return_scores=True, impl="ref")


def _inputs(case, **kwargs):
    return {name: x for name, x in case.inputs(**kwargs).items() if x is not None}


@pytest.mark.parametrize("name", [pytest.param("odd63", marks=pytest.mark.slow), "odd65_packed"])
def test_exact_with_ties(name):
    case = specs.CASES[name]
    inputs = _inputs(case, whole=True)
    indices, scores = TPU(**inputs, **case.options())
    expected, expected_scores = REF(**inputs, **case.options())
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_several_tiles_equal_reference(dtype):
    """257 queries among 600 keys; NaN in what no query sees."""
    case = specs.Case(1, 257, 600, 4, 16, 9)
    inputs = _inputs(case, dtype=jnp.dtype(dtype))
    seg_k = jnp.where(jnp.arange(600) < 450, 1, 2).at[-3:].set(0)[None]
    inputs |= {"segment_ids": seg_k[:, 343:], "kv_segment_ids": seg_k}
    expected, expected_scores = REF(**inputs, **case.options())
    inputs["q_idx"] = inputs["q_idx"].at[:, -3:].set(jnp.nan)
    inputs["k_idx"] = inputs["k_idx"].at[:, -3:].set(jnp.nan)
    indices, scores = TPU(**inputs, **case.options())
    np.testing.assert_array_equal(indices < 0, expected < 0)
    seen = np.asarray(expected) >= 0
    np.testing.assert_allclose(scores[seen], expected_scores[seen], atol=1e-5)
    assert np.mean(np.asarray(indices)[seen] == np.asarray(expected)[seen]) > 0.99


@pytest.mark.parametrize("slices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_slices_of_queries_equal_the_whole(slices):
    x = _inputs(specs.Case(1, 64, 64, 4, 8, 7, starts=(20, 41), padding=2), whole=True)
    x["kv_segment_ids"] = x["segment_ids"]
    expected, size, parts = REF(**x, top_k=7)[0], 64 // slices, []
    for start in range(0, 64, size):
        cut = {name: x[name][:, start : start + size] for name in ("q_idx", "w_idx", "segment_ids")}
        parts.append(TPU(**x | cut, top_k=7, q_offset=jnp.int32(start))[0])
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), expected)


def test_few_queries_are_for_another():
    x = _inputs(specs.Case(1, 1, 20, 2, 4, 3))
    with pytest.raises(NotImplementedError, match="fewer than 8"):
        lightning_indexer(**x, top_k=3, impl="pallas_tpu")


def test_recall_counts_what_was_missed():
    exact = jnp.array([[[4, 2, 0], [1, -1, -1], [-1, -1, -1]]])
    chosen = jnp.array([[[0, 4, 9], [1, -1, -1], [-1, -1, -1]]])
    assert recall(exact, exact, 10) == 1
    assert recall(chosen, exact, 10) == 0.75
    assert recall(jnp.full_like(exact, -1), exact, 10) == 0
    assert recall(chosen, jnp.full_like(exact, -1), 10) == 1


@pytest.mark.parametrize("impl", ["chunked", "pallas_tpu"])
def test_approximate_choice_only_by_request(impl):
    """On a CPU it happens to be exact; what may be missed elsewhere is what `recall` counts."""
    x = _inputs(specs.Case(1, 40, 40, 2, 4, 8))
    exact = INDEX(**x, top_k=8, impl=impl)
    chosen, scores = INDEX(**x, top_k=8, impl=impl, approx_recall=0.9, return_scores=True)
    assert recall(chosen, exact, 40) >= 0.9
    np.testing.assert_array_equal(chosen < 0, exact < 0)
    np.testing.assert_array_equal(np.asarray(chosen) < 0, np.asarray(scores) == -np.inf)
    with pytest.raises(ValueError, match="approx_recall"):
        lightning_indexer(**x, top_k=8, approx_recall=1.5)
