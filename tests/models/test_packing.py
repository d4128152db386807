"""The whole hybrid model on a packed row equals its documents alone: logits, loss, every gradient.

Also what must not change a gradient: rematerialisation.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.models.parts import ModelParts
from tests.models.running import FAST_COMPILE, forward, lively, row_of, stack_rows
from tests.models.small_configs import small

LENGTHS = (1, 63, 64, 65, 200)  # around the KDA chunk of 64, and several chunks long
CONFIG = small("kda,kda,dsa", 5, kda={"chunk": 64}, dsa={"top_k": 24})
TOLERANCE = {"float32": 2e-4, "float64": 1e-10}


@functools.cache
def model() -> tuple[ModelParts, dict, dict]:
    return lively(CONFIG, seed=4)


@functools.cache
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, CONFIG.vocab_size, n, dtype=np.int32) for n in LENGTHS]


@functools.cache
def alone_rows() -> dict[str, np.ndarray]:
    """One document a row; the longest fills its row, the others are padded in front."""
    return stack_rows([row_of([document], max(LENGTHS)) for document in documents()])


@functools.cache
def packed_row() -> dict[str, np.ndarray]:
    return stack_rows([row_of(documents(), sum(LENGTHS))])


@functools.cache
def compiled(dtype: str, remat: str):
    """(params, balance, rows) -> (objective, (logits, loss a row)), gradients of both losses."""
    parts = model()[0]

    def objective(params, balance, rows):
        options = {"dtype": jnp.dtype(dtype), "remat": remat}
        logits, loss_B, measured = forward(parts, params, balance, rows, **options)
        return loss_B.sum() + measured["indexer_kl"].sum(), (logits, loss_B)

    return jax.jit(jax.value_and_grad(objective, has_aux=True), compiler_options=FAST_COMPILE)


def run(rows: dict, dtype: str, remat: str = "none"):
    with jax.enable_x64(dtype == "float64"), jax.default_matmul_precision("highest"):
        params = jax.tree.map(lambda a: jnp.asarray(a, dtype), model()[1])
        (_, (logits, loss_B)), grads = compiled(dtype, remat)(params, model()[2], rows)
        return jax.tree.map(np.asarray, (logits, loss_B, grads))


run_packed = functools.cache(lambda dtype: run(packed_row(), dtype))
run_alone = functools.cache(lambda dtype: run(alone_rows(), dtype))

DTYPES = pytest.mark.parametrize(
    "dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"]
)


def borders():
    ends = np.cumsum(LENGTHS)
    return [slice(end - n, end) for end, n in zip(ends, LENGTHS, strict=True)]


@DTYPES
def test_logits(dtype):
    packed, alone = run_packed(dtype)[0], run_alone(dtype)[0]
    for document, place in enumerate(borders()):
        want = alone[document, -LENGTHS[document] :]
        error = np.max(np.abs(packed[0, place] - want))
        assert error <= TOLERANCE[dtype] * np.max(np.abs(want)), document


@DTYPES
def test_loss(dtype):
    packed, alone = run_packed(dtype)[1], run_alone(dtype)[1]
    np.testing.assert_allclose(packed.sum(), alone.sum(), rtol=TOLERANCE[dtype])
    assert alone[0] == 0  # one token has no next one


def assert_same_gradients(got, want, tolerance):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        norm = np.linalg.norm(b)
        # Layer 0 reads the embedding alone, so its mix has no say; everything else must learn.
        assert norm > 0 or name.startswith("['stack0']['run0']['attn_mix']"), name
        assert np.linalg.norm(a - b) <= tolerance * norm, name


@DTYPES
def test_every_gradient(dtype):
    assert_same_gradients(run_packed(dtype)[2], run_alone(dtype)[2], TOLERANCE[dtype])


def test_other_documents_keep_their_logits():
    before = run_packed("float32")[0]
    for changed in (1, 3):
        rows = jax.tree.map(np.copy, packed_row())
        place = borders()[changed]
        rows["tokens"][0, place] = (rows["tokens"][0, place] + 7) % CONFIG.vocab_size
        after = run(rows, "float32")[0]
        assert np.max(np.abs(after[0, place] - before[0, place])) > 0.1
        for other in set(range(len(LENGTHS))) - {changed}:
            np.testing.assert_allclose(
                after[0, borders()[other]], before[0, borders()[other]], rtol=0, atol=1e-6
            )


def test_rematerialisation_changes_no_gradient():
    logits, loss_B, grads = run(packed_row(), "float64", "full")
    want_logits, want_loss_B, want_grads = run_packed("float64")
    np.testing.assert_allclose(logits, want_logits, rtol=0, atol=1e-10)
    np.testing.assert_allclose(loss_B, want_loss_B, rtol=1e-12)
    assert_same_gradients(grads, want_grads, 1e-10)
