"""`generate`: tokens, batches, buckets, stops, callbacks, meshes."""

import functools

import numpy as np
import pytest

from moejax.config import ConfigError
from moejax.generate import Buckets, Generator, LanguageModel, generate
from moejax.generate.engine import power_of_two
from moejax.models.parts import model_parts
from tests.generate.decoding import checkpoint, greedy, small
from tests.sharded.meshes import FSDP2_EXPERT4, ONE

ORACLE = "deepseek_v3"
DRAWN = {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "seed": 5}


@functools.cache
def model() -> LanguageModel:
    """One model for the module: its programs are compiled once."""
    return small("dense").on(ONE, Buckets(prompt=16, capacity=64, batch=4))


def random_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 50, n).tolist() for n in lengths]


def test_greedy_continuations_are_the_published_codes():
    oracle, lengths = greedy(ORACLE), (1, 5, 65)
    prompts = [oracle[f"p{n}_prompt"].tolist() for n in lengths]
    want = [oracle[f"p{n}_tokens"].tolist() for n in lengths]
    assert checkpoint(ORACLE).on(ONE).generate(prompts, max_new_tokens=40) == want


def test_each_shape_bucket_compiles_once():
    generate(model(), random_prompts(1, 5), max_new_tokens=40)
    counts = dict(model().generator.compilations)
    # Other lengths, counts of tokens and numbers of rows, of the same powers of two.
    generate(model(), random_prompts(5, 5), max_new_tokens=7)
    generate(model(), random_prompts(16, 1), max_new_tokens=48)
    assert dict(model().generator.compilations) == counts
    generate(model(), random_prompts(17, 1), max_new_tokens=30)  # 17 tokens need a row of 32
    assert model().generator.compilations["prefill"] == counts["prefill"] + 1
    assert model().generator.compilations["step"] == counts["step"]


def test_rows_do_not_change_each_other():
    """Seven prompts in two turns, three in one, one alone."""
    prompts = random_prompts(3, 9, 1, 16, 5, 2, 7)
    together = generate(model(), prompts, max_new_tokens=12, **DRAWN)
    assert all(len(row) == 12 for row in together)
    for count in (1, 3):
        assert generate(model(), prompts[:count], max_new_tokens=12, **DRAWN) == together[:count]
    assert generate(model(), prompts, max_new_tokens=12, **DRAWN | {"seed": 6}) != together


def test_a_row_ends_at_a_stop_token():
    prompts = random_prompts(5, 1)
    free = generate(model(), prompts, max_new_tokens=40)
    stop = free[0][7]
    want = [row[: row.index(stop)] if stop in row else row for row in free]
    assert generate(model(), prompts, max_new_tokens=40, stop={stop}) == want
    assert len(want[0]) <= 7


def test_tokens_are_told_as_they_come_and_the_listener_may_end_a_row():
    prompts = random_prompts(1, 5)
    free = generate(model(), prompts, max_new_tokens=10)
    heard: list[tuple[int, int]] = []

    def listen(row, token):
        heard.append((row, token))
        return row == 0 and sum(r == 0 for r, _ in heard) == 3

    out = generate(model(), prompts, max_new_tokens=10, on_token=listen)
    assert out == [free[0][:3], free[1]]
    assert heard[:6] == [(r, out[r][i]) for i in range(3) for r in (0, 1)]
    assert [t for r, t in heard if r == 1] == out[1]


def test_a_mesh_gives_the_same_tokens():
    """Three prompts on eight devices, experts over four of them."""
    prompts = random_prompts(5, 1, 12)
    one, eight = (small("moe").on(sizes) for sizes in (ONE, FSDP2_EXPERT4))
    want = one.generate(prompts, max_new_tokens=6, **DRAWN)
    assert eight.generate(prompts, max_new_tokens=6, **DRAWN) == want


def test_no_token_is_dropped_where_training_had_a_capacity():
    cfg = small("moe").parts.cfg
    tight = cfg.replace(moe=cfg.moe.replace(capacity_factor=0.01, exchange="padded"))
    assert Generator(model_parts(tight)).parts.cfg == cfg


def test_nothing_asked_is_nothing_given():
    assert generate(model(), [[1]], max_new_tokens=0) == [[]]
    assert generate(model(), [], max_new_tokens=5) == []


@pytest.mark.parametrize(
    ("prompts", "options", "line"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 50]], {}, "prompt 0 holds token 50; the model knows 0 to 49"),
        ([[-1]], {}, "prompt 0 holds token -1"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1 is not allowed"),
        ([[1]], {"top_p": 2.0}, "top_p=2.0 is not allowed"),
    ],
)
def test_bad_input_is_one_line(prompts, options, line):
    with pytest.raises(ConfigError, match=line) as error:
        generate(model(), prompts, **{"max_new_tokens": 1} | options)
    assert "\n" not in str(error.value)


def test_powers_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]
    assert power_of_two(3, floor=16) == 16
