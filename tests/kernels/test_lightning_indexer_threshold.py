"""Selection without a sort, for CPUs: the keys of a stable sort, whatever ties, and in groups."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.lightning_indexer import choice, lightning_indexer, specs, threshold
from pallas_kernels.lowering import lowered

SELECT = jax.jit(threshold.select, static_argnums=1)
ROWS = 7


def rows_of(kind: str, S: int) -> np.ndarray:
    """[ROWS, S]: rows with the given trouble; every row sees another number of keys."""
    rng = np.random.default_rng(S)
    x = rng.standard_normal((ROWS, S)).astype(np.float32)
    if kind == "quantised":
        x = np.round(2 * x) / 2 + 0.0
    if kind == "equal":
        x = np.full_like(x, -1.5)
    if kind == "extreme":  # numbers at both ends, what a NaN has become, and tiny ones
        low, high = np.finfo(np.float32).min, np.finfo(np.float32).max
        x = rng.choice(np.float32([low, -1e-38, 0.0, 1e-38, 1.0, high, np.inf]), (ROWS, S))
    visible = np.array([0, 1, 2, S // 3, S // 2, S - 1, S])[:, None]
    return np.where(rng.permuted(np.tile(np.arange(S), (ROWS, 1)), axis=1) < visible, x, -np.inf)


@pytest.mark.parametrize("kind", ["random", "quantised", "equal", "extreme"])
@pytest.mark.parametrize(("S", "J"), [(33, 33), (65, 40), (1000, 257)])
def test_the_keys_of_a_stable_sort(kind, S, J, monkeypatch):
    monkeypatch.setattr(
        threshold, "_GROUP_BYTES", 3 * 4 * S
    )  # groups of three rows, the last short
    x = rows_of(kind, S)
    indices, values = (np.asarray(a) for a in SELECT(x, J))
    for row, found, value in zip(x, indices, values, strict=True):
        best = np.argsort(-row, kind="stable")[:J]
        wanted = np.sort(best[row[best] > -np.inf])
        np.testing.assert_array_equal(found[: len(wanted)], wanted)
        np.testing.assert_array_equal(value[: len(wanted)], row[wanted])
        assert (found[len(wanted) :] == -1).all() and (value[len(wanted) :] == -np.inf).all()


def test_any_order_has_the_keys_of_the_reference():
    """Packed rows, ties everywhere, -0.0 and NaN; more keys asked for than some queries see."""
    x = specs.Case(2, 130, 130, 3, 4, 40, starts=(50, 52), padding=5).inputs(whole=True)
    x["w_idx"] = x["w_idx"].at[0].set(-jnp.abs(x["w_idx"][0]) - 1)  # a dead relu gives -0.0
    x["k_idx"] = x["k_idx"].at[:, jnp.array([3, 60])].set(jnp.nan)
    index = functools.partial(lightning_indexer, top_k=40, return_scores=True)
    found = jax.jit(functools.partial(index, order="any"))(**x)
    wanted = jax.jit(functools.partial(index, order="position", impl="ref"))(**x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(found[1]) == np.finfo(np.float32).min).any()  # a NaN that was chosen


@pytest.mark.parametrize(
    ("platform", "J", "order", "sorts"),
    [("cpu", 32, "any", False), ("cpu", 31, "any", True), ("cpu", 32, "score", True),
     ("gpu", 32, "any", True)],
)  # fmt: skip
def test_who_selects_so(platform, J, order, sorts):
    def choose(x):
        return choice.choose_keys(x, J, order, None)

    shape = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    text = jax.jit(choose).lower(shape).as_text() if platform == "cpu" else ""
    text = text or lowered(choose, (shape,), platform)
    assert ("top_k" in text) == sorts
