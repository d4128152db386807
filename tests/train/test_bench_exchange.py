"""The benchmark's parts run, its cases compute the same, and more experts are no more program."""

import json

import pytest

from moejax.config import MoeConfig
from moejax.train import bench_exchange as bench
from moejax.train.bench_compile import DEEP, deep_program, lower_step
from tests.models.running import FAST_COMPILE

ONE_LAYER = {
    "model.attention": "mla", "model.last_attention": "", "model.attn_res_block": "0",
    "model.ffn.num_dense_layers": "0", "optim.name": "adamw", "optim.qk_clip": "0",
}  # fmt: skip
CASES = (bench.LOCAL, bench.Case("padded"))
TOY = bench.Sizes(
    tiny=ONE_LAYER | {"model.num_layers": "1", "model.dim": "16", "data.seq_len": "16"},
    tiny_cases=CASES,
    layer_cases=CASES,
    moe=MoeConfig(num_experts=16, top_k=2, expert_dim=8, latent_dim=0, balance="none"),
    dim=16,
    rows=8,
    tokens=8,
    deep=DEEP | ONE_LAYER,
    layers=(1, 1),
    rounds=2,
    compiler_options=FAST_COMPILE,
)


@pytest.fixture
def measured(capsys):
    def of(part: str) -> list[dict]:
        assert bench.main([f"--part={part}", "--json"], TOY) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return of


@pytest.mark.parametrize("part", ["layer", pytest.param("tiny", marks=pytest.mark.slow)])
def test_cases_compute_the_same(part, measured):
    local, other = measured(part)
    assert local["exchange"] == "local" and local["ratio"] == 1 and other["ratio"] > 0
    assert other["value"] == pytest.approx(local["value"], rel=1e-4)
    table = bench.markdown([local, other]).splitlines()
    assert table[3].startswith("| `padded` | `expert` | 1 | ") and len(table) == 4


def test_896_experts_lower_to_what_16_do():
    few, many = (lower_step(deep_program(TOY.deep, 1, experts)).as_text() for experts in (16, 896))
    assert "tensor<112x" in many and "tensor<112x" not in few  # those of one of 8 devices
    assert len(many) <= bench.LIMIT * len(few)
    assert many.count("\n") <= bench.LIMIT * few.count("\n")


@pytest.mark.slow
def test_896_experts_compile_to_what_16_do(measured):
    few, many = measured("compile")
    assert (few["experts"], many["experts"]) == (16, 896)
    for name in ("lowered_lines", "compiled_lines"):
        assert few[name] > 500
        assert many[name] <= few[name] * bench.LIMIT
    assert bench.markdown([few, many]).splitlines()[3].startswith("| 1 | 896 | ")
