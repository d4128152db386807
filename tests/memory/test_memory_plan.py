"""Bytes and FLOPs of a model's results, read from its trace, against counts by hand."""

from __future__ import annotations

import pytest

from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.memory.names import KNOWN
from moejax.train.memory_plan import (
    following,
    keeping_nothing,
    plan_of_shapes,
    program_of_shapes,
    recomputed_share,
)
from tests.memory.test_policies import TOY


def config(**changes):
    return load_config("tiny", {**TOY, **{k.replace("__", "."): v for k, v in changes.items()}})


@pytest.fixture(scope="module")
def plan_and_tokens():
    cfg = config(train__remat="auto", swap__budget_gib=1.0)
    return plan_of_shapes(cfg, cfg.check(2))


def test_bytes_and_flops_of_a_token(plan_and_tokens):
    plan, tokens = plan_and_tokens
    model, found = config().model, {one.name: one for one in plan.decisions}
    assert tokens == 32 and found.keys() <= KNOWN.keys()
    kda, moe, width = model.kda, model.moe, 4  # float32
    heads = kda.num_heads * (2 * kda.head_dim + kda.value_head_dim)
    queries = model.mla.num_heads * (model.mla.nope_dim + model.mla.rope_dim)
    by_hand = {
        "kda_qkv": (1, heads * width, None),
        "mla_queries": (1, queries * width, None),
        "attention_out": (2, model.dim * width, None),
        "moe_router": (2, moe.num_experts * width, 2 * model.dim * moe.num_experts),
        "moe_latent": (2, moe.latent_dim * width, 2 * model.dim * moe.latent_dim),
    }
    for name, (layers, size, flops) in by_hand.items():
        one = found[name]
        assert (one.layers, one.size / tokens) == (layers, layers * size), name
        if flops is not None:  # with the adapter's two small products
            assert one.flops / tokens / layers == pytest.approx(flops, rel=0.6), name
            assert one.flops / tokens / layers >= flops


def test_with_room_for_all_nothing_of_weight_is_computed_again(plan_and_tokens):
    plan, _ = plan_and_tokens
    assert plan.saved_share > 0.5 and not plan.names("offload")
    assert {"kda_qkv", "moe_returned", "attended"} <= set(plan.names("keep"))


def test_a_plan_becomes_plain_fields(plan_and_tokens):
    plan, _ = plan_and_tokens
    cfg = following(config(train__remat="auto"), plan)
    assert cfg.train.remat == "full" and cfg.swap.keep == plan.names("keep")
    assert keeping_nothing(config(train__remat="auto")).train.remat == "full"


def test_the_share_that_runs_again_follows_the_policy(plan_and_tokens):
    plan, _ = plan_and_tokens

    def share(**changes):
        cfg = config(**changes)
        return recomputed_share(program_of_shapes(cfg, cfg.check(2)))

    kept = {"train__remat": "full", "swap__keep": plan.names("keep")}
    assert share(train__remat="none") == 0 and share(train__remat="full") == 1
    assert share(train__remat="auto") == 1  # nothing chosen yet
    assert share(**kept) == pytest.approx(1 - plan.saved_share)
    assert 0 < share(train__remat="dots") < share(train__remat="exchange") < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__remat": "auto"}, "give swap.budget_gib"),
        ({"train__remat": "full", "swap__keep": ("kda_gates",)}, "Did you mean kda_gate"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, message):
    cfg = config(**changes)
    with pytest.raises(ConfigError, match=message):
        plan_of_shapes(cfg, cfg.check(2))
    with pytest.raises(ConfigError, match="does not go with train.remat=auto"):
        keeping_nothing(config(train__remat="auto", swap__offload=("kda_qkv",)))
