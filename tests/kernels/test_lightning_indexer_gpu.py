"""The indexer's GPU kernels in the interpreter: the same keys as a stable sort, whatever ties."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer, specs
from pallas_kernels.lightning_indexer.pallas_gpu_select import select
from pallas_kernels.lightning_indexer.tiles import tiles_for

STATIC = ("top_k", "order", "return_scores", "impl")
# each program runs a few times: compiled in a third of the time
FAST = {"xla_backend_optimization_level": 0}
INDEX = jax.jit(lightning_indexer, static_argnames=STATIC, compiler_options=FAST)
GPU = functools.partial(INDEX, return_scores=True, impl="pallas_gpu")
REF = functools.partial(INDEX, return_scores=True, impl="ref")
TILES = tiles_for(128, 2)
CASES = specs.CASES | {"even64": specs.Case(1, 64, 64, 3, 24, 9)}


def _inputs(case, **kwargs):
    return {name: x for name, x in case.inputs(**kwargs).items() if x is not None}


@pytest.mark.parametrize(
    "name", ["one", pytest.param("even64", marks=pytest.mark.slow), "odd65_packed", "more_than_all"]
)
def test_exact_with_ties(name):
    """Small integers: scores tie everywhere and every sum is exact, so the indices are equal."""
    case = CASES[name]
    inputs = _inputs(case, whole=True)
    indices, scores = GPU(**inputs, **case.options())
    expected, expected_scores = REF(**inputs, **case.options())
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_several_tiles_equal_reference(dtype):
    """257 queries among 300 keys of two documents; NaN in what no query sees."""
    case = specs.Case(1, 257, 300, 4, 16, 9)
    inputs = _inputs(case, dtype=jnp.dtype(dtype))
    seg_k = jnp.where(jnp.arange(300) < 150, 1, 2).at[-3:].set(0)[None]
    inputs |= {"segment_ids": seg_k[:, 43:], "kv_segment_ids": seg_k}
    expected, expected_scores = REF(**inputs, **case.options())
    inputs["q_idx"] = inputs["q_idx"].at[:, -3:].set(jnp.nan)
    inputs["k_idx"] = inputs["k_idx"].at[:, -3:].set(jnp.nan)
    indices, scores = GPU(**inputs, **case.options())
    np.testing.assert_array_equal(indices < 0, expected < 0)
    seen = np.asarray(expected) >= 0
    np.testing.assert_allclose(scores[seen], expected_scores[seen], atol=1e-5)
    assert np.mean(np.asarray(indices)[seen] == np.asarray(expected)[seen]) > 0.99


def _hard_rows(width):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((13, width)).astype(np.float32)
    rows[1] = np.round(rows[1])  # ties
    rows[2] = 0.25
    rows[3, 5:] = -np.inf  # shorter than what is asked for
    rows[4] = -np.inf
    rows[5, ::3] = np.inf
    rows[6] = np.finfo(np.float32).min
    rows[7, :20] = np.finfo(np.float32).min
    rows[8] *= 1e-42  # below the smallest normal number
    rows[9] = np.where(np.arange(width) % 2, np.float32(1), np.nextafter(np.float32(1), 2))
    rows[10] = np.arange(width)
    rows[11] = -np.arange(width)
    rows[12, : width // 2] = -np.inf
    return rows


@pytest.mark.parametrize(("part", "top_k"), [(512, 16), (64, 16), (64, 13), (512, 257)])
def test_selection_equals_a_stable_sort(part, top_k):
    """Whole rows and rows in parts of parts."""
    rows = _hard_rows(257)
    tiles = TILES._replace(select=part)
    indices, scores = jax.jit(lambda x: select(x, top_k, tiles), compiler_options=FAST)(rows)
    best = np.argsort(-rows, axis=1, kind="stable")[:, :top_k]
    for row, chosen, value, wanted in zip(rows, np.asarray(indices), scores, best, strict=True):
        wanted = np.sort(wanted[row[wanted] > -np.inf])
        np.testing.assert_array_equal(chosen[: len(wanted)], wanted)
        np.testing.assert_array_equal(value[: len(wanted)], row[wanted])
        assert (chosen[len(wanted) :] == -1).all() and (value[len(wanted) :] == -np.inf).all()


@pytest.mark.parametrize("impl", ["pallas_gpu", "chunked", "ref"])
def test_keys_without_a_number_come_last_but_count(impl):
    """A NaN key is visible: with room for all it is chosen, with less it is left out."""
    x = _inputs(specs.Case(1, 9, 9, 2, 4, 9), whole=True)
    x["k_idx"] = x["k_idx"].at[0, 3].set(jnp.nan)
    x["w_idx"] = -jnp.abs(x["w_idx"]) - 1  # all scores are -0.0 or below
    indices, scores = INDEX(**x, top_k=9, return_scores=True, impl=impl)
    counts = (np.asarray(indices) >= 0).sum(-1)[0]
    np.testing.assert_array_equal(counts, np.arange(1, 10))
    for t in range(3, 9):
        assert indices[0, t, t] == 3 and scores[0, t, t] == np.finfo(np.float32).min
    assert not (np.asarray(INDEX(**x, top_k=3, impl=impl))[:, 3:] == 3).any()
    np.testing.assert_array_equal(indices, REF(**x, top_k=9)[0])


def test_an_infinite_score_is_first_with_few_heads():
    """A lone query's heads fill a tile of 16; 0 times a key of inf must not reach its score."""
    q, w = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 1, 2))
    keys = jnp.ones((1, 4, 16)).at[0, 2].set(jnp.inf)
    indices, scores = GPU(q, keys, w, top_k=2, q_offset=3)
    assert indices.tolist() == [[[2, 0]]] and scores[0, 0, 0] == jnp.inf


@pytest.fixture(scope="module")
def packed():
    x = _inputs(specs.Case(1, 64, 64, 4, 8, 7, starts=(20, 41), padding=2), whole=True)
    x["kv_segment_ids"] = x["segment_ids"]
    return x, REF(**x, top_k=7)


def _queries(x, start, size):
    cut = lambda a: a[:, start : start + size]  # noqa: E731
    return x | {name: cut(x[name]) for name in ("q_idx", "w_idx", "segment_ids")}


@pytest.mark.parametrize("slices", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_slices_of_queries_equal_the_whole(packed, slices):
    """Queries local, keys of all: the offset places them. 8 queries go through the other kernel."""
    x, (expected, _) = packed
    size = 64 // slices
    parts = [
        GPU(**_queries(x, start, size), top_k=7, q_offset=jnp.int32(start))[0]
        for start in range(0, 64, size)
    ]
    np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), expected)


@pytest.mark.parametrize("impl", ["pallas_gpu", "chunked"])
def test_one_query_equals_its_row_of_many(packed, impl):
    x, (expected, scores) = packed
    for t in (0, 19, 20, 50, 63):
        one = INDEX(
            **_queries(x, t, 1), top_k=7, q_offset=jnp.int32(t), return_scores=True, impl=impl
        )
        np.testing.assert_array_equal(one[0], expected[:, t : t + 1])
        np.testing.assert_array_equal(one[1], scores[:, t : t + 1])


def test_no_pick_crosses_a_border(packed):
    x, (expected, _) = packed
    indices = np.asarray(GPU(**x, top_k=7)[0])
    np.testing.assert_array_equal(indices, expected)
    seg = np.asarray(x["segment_ids"])[0]
    chosen = indices[0] >= 0
    assert (seg[np.maximum(indices[0], 0)] == seg[:, None])[chosen].all()
    begins = np.array([0] * 20 + [20] * 21 + [41] * 21 + [62] * 2)
    visible = np.where(seg > 0, np.arange(64) - begins + 1, 0)
    np.testing.assert_array_equal(chosen.sum(-1), np.minimum(7, visible))


def test_rising_order_has_the_same_keys(packed):
    x, (expected, scores) = packed
    for impl in ("pallas_gpu", "chunked", "ref"):
        rising, values = INDEX(**x, top_k=7, order="position", return_scores=True, impl=impl)
        last = np.where(np.asarray(expected) < 0, 64, expected)
        wanted = np.sort(last, axis=-1)
        np.testing.assert_array_equal(rising, np.where(wanted == 64, -1, wanted))
        at = np.argsort(last, axis=-1, kind="stable")
        wanted = np.take_along_axis(np.asarray(scores), at, -1)
        np.testing.assert_allclose(values, wanted, rtol=1e-6)


def test_refusals():
    x = _inputs(specs.CASES["odd63"])
    with pytest.raises(NotImplementedError, match="exactly"):
        lightning_indexer(**x, top_k=3, approx_recall=0.9, impl="pallas_gpu")
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        doubles = {name: a.astype(jnp.float64) for name, a in x.items()}
        lightning_indexer(**doubles, top_k=3, impl="pallas_gpu")
