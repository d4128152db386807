"""Lightning indexer: golden, ties, invariants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import lightning_indexer, recall, specs
from pallas_kernels.lightning_indexer.scores import ranked

INDEX = jax.jit(lightning_indexer, static_argnames=("top_k", "q_offset", "return_scores", "impl"))
SCORED = functools.partial(INDEX, return_scores=True)
RUNS = [(name, "float32") for name in specs.CASES]
RUNS += [("odd65_packed", "bfloat16"), ("two_blocks", "bfloat16")]


def _inputs(case, **kwargs):
    inputs = case.inputs(**kwargs)
    return {name: x for name, x in inputs.items() if x is not None}


@pytest.mark.parametrize("name", specs.CASES)
def test_exact_with_ties(name):
    """Small integers: scores tie everywhere and every sum is exact, so the indices are equal."""
    case = specs.CASES[name]
    inputs = _inputs(case, whole=True)
    indices, scores = SCORED(**inputs, **case.options())
    expected, expected_scores = SCORED(**inputs, **case.options(), impl="ref")
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(scores, expected_scores)


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_chunked_equals_ref(name, dtype, strict_promotion):
    case = specs.CASES[name]
    inputs = _inputs(case, dtype=jnp.dtype(dtype))
    indices, scores = SCORED(**inputs, **case.options())
    expected, expected_scores = SCORED(**inputs, **case.options(), impl="ref")
    np.testing.assert_array_equal(indices < 0, expected < 0)
    seen = np.asarray(expected) >= 0
    np.testing.assert_allclose(scores[seen], expected_scores[seen], atol=1e-5)
    assert np.mean(np.asarray(indices)[seen] == np.asarray(expected)[seen]) > 0.99


def test_golden():
    q, k = jnp.array([[[[1.0], [-1.0]]] * 2]), jnp.array([[[3.0], [-2.0]]])
    w = jnp.array([[[1.0, 2.0]] * 2])
    indices, scores = SCORED(q, k, w, top_k=2)
    np.testing.assert_array_equal(indices[0], [[0, -1], [1, 0]])
    np.testing.assert_allclose(scores[0, 1], [2.82843, 2.12132], atol=1e-5)
    assert INDEX(q, k, w, top_k=1)[0, 1, 0] == 1


def test_visible_count_and_documents():
    """D6, and D5's selection: {0} for the first query."""
    case = specs.CASES["odd65_packed"]
    inputs = _inputs(case)
    indices, seg = np.asarray(INDEX(**inputs, top_k=16)), np.asarray(inputs["segment_ids"])
    t = np.arange(65)[None, :, None]
    chosen = indices >= 0
    assert (indices <= t).all()
    rows = np.take_along_axis(seg[:, None].repeat(65, 1), np.maximum(indices, 0), -1)
    assert (rows == seg[..., None])[chosen].all()
    mask = (seg[:, :, None] == seg[:, None]) & (seg > 0)[..., None] & np.tri(65, dtype=bool)
    visible = mask.sum(-1)
    np.testing.assert_array_equal(chosen.sum(-1), np.minimum(16, visible))
    assert (indices[:, 0] == np.array([0] + [-1] * 15)).all()
    assert all(len(set(row[row >= 0])) == (row >= 0).sum() for row in indices.reshape(-1, 16))


def test_invariances():
    """D3: one rotation of q and k. D4: order of heads; a positive factor on w."""
    with jax.enable_x64(True):
        case = specs.Case(2, 40, 40, 4, 8, 7)
        x = _inputs(case, dtype=jnp.float64)
        rng = np.random.default_rng(0)
        turn = jnp.asarray(np.linalg.qr(rng.standard_normal((8, 8)))[0])
        indices, scores = SCORED(**x, top_k=7)
        seen = np.asarray(indices) >= 0
        rotated = dict(x, q_idx=x["q_idx"] @ turn, k_idx=x["k_idx"] @ turn)
        order = rng.permutation(4)
        permuted = dict(x, q_idx=x["q_idx"][:, :, order], w_idx=x["w_idx"][:, :, order])
        for same in (rotated, permuted):
            other, other_scores = SCORED(**same, top_k=7)
            np.testing.assert_allclose(other_scores[seen], scores[seen], rtol=1e-11, atol=1e-13)
            # dead heads tie at 0 in exact arithmetic and by rounding here: compare what is above
            high = seen & (np.abs(np.asarray(scores)) > 1e-9)
            np.testing.assert_array_equal(np.asarray(other)[high], np.asarray(indices)[high])
        scaled = INDEX(x["q_idx"], x["k_idx"], 3.7 * x["w_idx"], top_k=7)
        np.testing.assert_array_equal(scaled, indices)


def test_no_gradient():
    x = _inputs(specs.CASES["odd63"])
    grads = jax.grad(lambda x: jnp.sum(jnp.tril(SCORED(**x, top_k=1)[1][:, :, 0])))(x)
    assert all((grad == 0).all() for grad in jax.tree.leaves(grads))


def test_memory_is_linear():
    def temporaries(impl):
        shapes = [(1, 2048, 4, 16), (1, 2048, 16), (1, 2048, 4)]
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        compiled = INDEX.lower(*args, top_k=8, impl=impl).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries("chunked") * 8 < temporaries("ref")


def test_errors_say_what_to_do():
    x = _inputs(specs.CASES["odd63"])
    with pytest.raises(ValueError, match="top_k=0"):
        lightning_indexer(**x, top_k=0)


def test_a_number_that_is_none_is_below_every_number():
    """Also below -inf, and both are above what is not visible."""
    scores = jnp.array([jnp.nan, -jnp.inf, np.finfo(np.float32).min, -1, jnp.inf, 7])
    order = jnp.argsort(-ranked(scores, jnp.arange(6) < 5), stable=True)
    assert order.tolist() == [4, 3, 1, 2, 0, 5]


def test_recall_counts_only_keys_that_are_there():
    four = functools.partial(recall, num_keys=4)
    past = jnp.array([[[0, 7, -1]]])
    assert four(past, past) == 1
    assert four(jnp.array([[[3, 7, -1]]]), past) == 0


def test_shard_map_with_jax_own_checks():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("b",), devices=jax.devices()[:2], axis_types=auto)
    rows = jax.sharding.PartitionSpec("b")
    run = functools.partial(lightning_indexer, top_k=3)
    shared = jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows)
    x = {"q_idx": (2, 300, 2, 4), "k_idx": (2, 300, 4), "w_idx": (2, 300, 2)}
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in x.values()]
    assert jax.eval_shape(jax.jit(shared), *shapes).shape == (2, 300, 3)
