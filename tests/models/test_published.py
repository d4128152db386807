"""The decoder on tiny checkpoints in the published formats, against other packages' results."""

import functools

import jax
import numpy as np
import pytest

from moejax.config import MeshConfig
from moejax.models.parts import model_parts
from moejax.partitioning import make_mesh
from tests.models import published, running
from tests.reference import decoder as reference
from tests.reference.weights import by_layers, stacked

T = 165  # cases a (64 tokens) and b (101) in one row


@functools.cache
def result(name: str) -> running.Run:
    """Rows: case a alone, case b alone, both packed; gradient of b's mean loss.

    On eight devices, fsdp=2 x expert=4 (one device: tests/generate/test_model.py).
    """
    cases = published.cases(name)
    a, b = (cases[f"{case}_input_ids"][0] for case in "ab")
    rows = running.stack_rows([running.row_of(documents, T) for documents in ([a], [b], [a, b])])
    rows["labels"][1, -101:-1] = cases["b_labels"][0, 1:]  # labels of b that are ignored
    count = (rows["labels"][1] >= 0).sum()
    rows = {k: np.concatenate([a, np.zeros((5, T), a.dtype)]) for k, a in rows.items()}
    rows["labels"][3:] = -100
    parts = model_parts(published.config(name))
    params, balance = published.trees(name)
    weight_B = np.zeros(8, np.float32)
    weight_B[1] = 1 / count
    mesh = make_mesh(MeshConfig(fsdp=2, expert=4))
    return running.run(parts, params, balance, rows, loss_weight_B=weight_B, mesh=mesh)


def places(name: str, case: str):
    """Row alone, its tokens there, and its tokens in the packed row."""
    return (
        (0, slice(T - 64, T), slice(0, 64)) if case == "a" else (1, slice(T - 101, T), slice(64, T))
    )


BOTH = pytest.mark.parametrize("case", "ab")
ALL = pytest.mark.parametrize("name", published.NAMES)


@ALL
@BOTH
def test_logits_are_the_published_codes(name, case):
    row, tokens, _ = places(name, case)
    want = published.cases(name)[f"{case}_logits"][0]
    got = result(name).logits_BTV[row, tokens]
    assert np.max(np.abs(got - want)) <= 1e-4 * np.max(np.abs(want))


@ALL
@BOTH
def test_tokens_choose_the_same_experts(name, case):
    row, tokens, packed = places(name, case)
    ids_XBTA = np.sort(result(name).measured["ids"], -1)
    for place, layer in enumerate(range(1, published.config(name).num_layers)):
        want = np.sort(published.cases(name)[f"{case}_router_idx_{layer}"], -1)
        np.testing.assert_array_equal(ids_XBTA[place, row, tokens], want)
        np.testing.assert_array_equal(ids_XBTA[place, 2, packed], want)


@BOTH
def test_queries_select_the_same_keys(case):
    row, tokens, packed = places("deepseek_v32", case)
    picks = result("deepseek_v32").measured["picks"]
    for layer in range(published.config("deepseek_v32").num_layers):
        want = np.sort(published.cases("deepseek_v32")[f"{case}_indexer_idx_{layer}"][0], -1)
        for of, where in ((row, tokens), (2, packed)):
            got = picks[layer, of, where]
            got = np.sort(np.where(got >= 0, got - where.start, -1), -1)
            np.testing.assert_array_equal(got, want)


@ALL
@BOTH
def test_a_packed_row_is_its_documents_alone(name, case):
    row, tokens, packed = places(name, case)
    logits = result(name).logits_BTV
    scale = np.max(np.abs(logits[row, tokens]))
    assert np.max(np.abs(logits[2, packed] - logits[row, tokens])) <= 3e-5 * scale


@ALL
def test_loss(name):
    labels = published.cases(name)["b_labels"][0, 1:]
    got = result(name).loss_B[1] / (labels >= 0).sum()
    np.testing.assert_allclose(got, published.cases(name)["b_loss"], rtol=1e-5)


@ALL
def test_every_gradient_is_the_published_codes(name):
    want, _ = published.trees(name, "grads")
    got = result(name).grads
    for (path, w), g in zip(
        jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True
    ):
        # Per layer, so that a small gradient cannot hide behind a large one of the same kind.
        w, g = (
            np.asarray(a).reshape(-1, *a.shape[2:]) if path[0].key.startswith("stack") else a[None]
            for a in (w, g)
        )
        for layer in range(len(w)):
            error, norm = np.linalg.norm(g[layer] - w[layer]), np.linalg.norm(w[layer])
            assert error <= 1e-3 * max(norm, 1e-5), (jax.tree_util.keystr(path), layer, error, norm)


@ALL
@BOTH
def test_the_numpy_reference_agrees_with_the_published_code(name, case):
    cases = published.cases(name)
    logits_TV, _ = reference.forward(
        published.config(name), published.weights(name), cases[f"{case}_input_ids"][0]
    )
    want = cases[f"{case}_logits"][0]
    assert np.max(np.abs(logits_TV - want)) <= 2e-5 * np.max(np.abs(want))


def test_weights_survive_stacking_and_unstacking():
    parts = model_parts(published.config("k3_text"))
    weights = published.weights("k3_text")
    back = by_layers(parts, *stacked(parts, weights))
    jax.tree.map(np.testing.assert_array_equal, back, weights)
