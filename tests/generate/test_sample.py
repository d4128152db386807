"""What a draw may pick, how often, and what it depends on."""

import functools

import jax
import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.generate import Sampling
from moejax.generate.sample import choose, make_draw

LOGITS = np.array([1.0, -2.0, 0.5, 3.0, 2.0, -1.0, 2.5, 0.0], np.float32)
ROWS = 8192


@functools.cache
def program(greedy: bool, top_k: int):
    return jax.jit(functools.partial(choose, greedy=greedy, top_k=top_k))


def drawn(rows=tuple(range(ROWS)), place=0, logits=LOGITS, **settings) -> np.ndarray:
    """Tokens of rows that all have the same logits."""
    sampling = Sampling(**settings)
    logits_BV = np.broadcast_to(logits, (len(rows), len(logits)))
    draw = make_draw(sampling, np.asarray(rows, np.int32))
    run = program(sampling.greedy, sampling.top_k)
    return np.asarray(run(jax.numpy.asarray(logits_BV), draw, jax.numpy.int32(place)))


def expected(temperature: float, kept: list[int]) -> np.ndarray:
    p = np.where(np.isin(np.arange(8), kept), np.exp(LOGITS / temperature), 0)
    return p / p.sum()


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"temperature": 1.0}, range(8)),
        ({"temperature": 0.7, "top_k": 3}, [3, 6, 4]),
        ({"temperature": 2.0, "top_k": 100}, range(8)),
        # 0.446, 0.270, 0.164, ...: two hold 0.716, three 0.880.
        ({"temperature": 1.0, "top_p": 0.7}, [3, 6]),
        ({"temperature": 1.0, "top_p": 0.72}, [3, 6, 4]),
        # Of the three kept ones the first alone holds 0.506.
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5}, [3]),
    ],
)
def test_tokens_come_as_often_as_they_should(settings, kept):
    p = expected(settings["temperature"], list(kept))
    share = np.bincount(drawn(**settings), minlength=8) / ROWS
    assert not share[p == 0].any()
    assert np.max(np.abs(share - p)) <= 4 * np.sqrt(0.25 / ROWS)


@pytest.mark.parametrize(
    "settings",
    [{}, {"temperature": 5.0, "top_k": 1}, {"temperature": 5.0, "top_p": 1e-6}],
)
def test_the_best_token_alone_is_the_greedy_choice(settings):
    assert set(drawn(**settings).tolist()) == {3}


def test_a_tie_takes_the_lowest_token():
    tied = np.array([0.0, 1.0, 1.0, 1.0], np.float32)
    assert set(drawn(logits=tied).tolist()) == {1}
    assert set(drawn(logits=tied, temperature=1.0, top_k=1).tolist()) == {1}


def test_a_draw_depends_on_seed_row_and_place_alone():
    settings = {"temperature": 1.0, "seed": 3}
    base = drawn(np.arange(64), **settings)
    np.testing.assert_array_equal(drawn(np.arange(64), **settings), base)
    np.testing.assert_array_equal(drawn(np.array([40, 7]), **settings), base[[40, 7]])
    for other in (drawn(np.arange(64), place=1, **settings), drawn(np.arange(64), temperature=1.0)):
        assert 5 <= np.sum(other != base) < 64


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1.0), ("temperature", float("nan")), ("top_k", -1), ("top_p", 0.0)]
    + [("top_p", 1.5), ("seed", -1)],
)
def test_a_setting_out_of_range_is_one_line_that_names_it(field, value):
    with pytest.raises(ConfigError, match=f"^{field}=.*allowed") as error:
        Sampling(**{field: value})
    assert "\n" not in str(error.value)
