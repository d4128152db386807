"""The decoder against the float64 NumPy reference, over configs that turn every switch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.running import lively, row_of, run, stack_rows
from tests.models.small_configs import CONFIGS
from tests.reference import decoder as reference
from tests.reference.weights import by_layers

LENGTHS = ((1, 2, 17, 30), (40, 9))  # of the documents in each row; the second is padded in front
T = sum(LENGTHS[0])

EVERY = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def documents(name: str) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(len(name))
    return [
        [rng.integers(0, CONFIGS[name].vocab_size, n, dtype=np.int32) for n in row]
        for row in LENGTHS
    ]


@functools.cache
def packed(name: str) -> dict[str, np.ndarray]:
    return stack_rows([row_of(row, T) for row in documents(name)])


@functools.cache
def moejax_run(name: str, dtype: str):
    parts, params, balance = lively(CONFIGS[name])
    if dtype == "float32":
        return run(parts, params, balance, packed(name))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        return run(parts, wide, balance, packed(name), dtype=jnp.float64)


@functools.cache
def reference_run(name: str):
    """Logits and traces of every document, in the order of the rows."""
    weights = by_layers(*lively(CONFIGS[name]))
    return [
        (row, document, *reference.forward(CONFIGS[name], weights, document))
        for row, of_row in enumerate(documents(name))
        for document in of_row
    ]


def pieces(name: str):
    """(row, place of the document in it, its logits, its traces) of every document."""
    at = [T - sum(lengths) for lengths in LENGTHS]
    for row, document, logits, traces in reference_run(name):
        yield row, slice(at[row], at[row] + len(document)), logits, traces
        at[row] += len(document)


def layers_with(name: str, key: str) -> list[int]:
    return [i for i, trace in enumerate(reference_run(name)[0][3]) if key in trace]


@EVERY
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-9)])
def test_logits(name, dtype, tolerance):
    got_BTV = moejax_run(name, dtype).logits_BTV
    assert got_BTV.dtype == dtype
    for row, place, want_TV, _ in pieces(name):
        error = np.max(np.abs(got_BTV[row, place] - want_TV))
        assert error <= tolerance * np.max(np.abs(want_TV)), (row, place)


@EVERY
def test_loss(name):
    want_B, labels = np.zeros(len(LENGTHS)), packed(name)["labels"]
    for row, place, logits, _ in pieces(name):
        want_B[row] += reference.cross_entropy(logits, labels[row, place])
    np.testing.assert_allclose(moejax_run(name, "float32").loss_B, want_B, rtol=1e-4)


@EVERY
def test_experts_and_load(name):
    measured, layers = moejax_run(name, "float32").measured, layers_with(name, "ids")
    load = np.zeros((len(layers), CONFIGS[name].moe.num_experts))
    for row, place, _, traces in pieces(name):
        for x, layer in enumerate(layers):
            got = np.sort(measured["ids"][x, row, place], -1)
            np.testing.assert_array_equal(got, np.sort(traces[layer]["ids"], -1))
            load[x] += traces[layer]["load"]
    np.testing.assert_array_equal(measured["load"], load)
    assert not measured["dropped"].any()


@pytest.mark.parametrize("name", ["hybrid", "half"])
def test_selected_keys(name):
    picks, layers = moejax_run(name, "float32").measured["picks"], layers_with(name, "picks")
    for row, place, _, traces in pieces(name):
        for x, layer in enumerate(layers):
            for t, want in enumerate(traces[layer]["picks"]):
                got = picks[x, row, place.start + t]
                np.testing.assert_array_equal(np.sort(got[got >= 0]) - place.start, want)


@pytest.mark.parametrize("name", ["hybrid", "half", "warmup"])
def test_indexer_loss(name):
    layers = layers_with(name, "indexer_kl")
    want = [sum(traces[i]["indexer_kl"] for *_, traces in pieces(name)) for i in layers]
    np.testing.assert_allclose(moejax_run(name, "float32").measured["indexer_kl"], want, rtol=1e-4)
    assert min(want) > 0.1  # no zero against zero


@pytest.mark.parametrize("name", ["hybrid", "half", "warmup", "yarn", "narrow"])
def test_largest_attention_logit_of_each_head(name):
    layers = layers_with(name, "max_logit")
    want = np.max([[traces[i]["max_logit"] for i in layers] for *_, traces in pieces(name)], axis=0)
    np.testing.assert_allclose(moejax_run(name, "float32").measured["max_logit"], want, rtol=1e-4)
