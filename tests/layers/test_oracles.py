"""Rotation, routing and SiTU against the numbers of transformers and mlx-lm: each array of each
fixture, in float32 and bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import MlaConfig, MoeConfig
from moejax.layers import rope
from moejax.layers.ffn import situ
from moejax.layers.moe.balance import bias_step
from moejax.layers.moe.router import Router, route
from tests.kernels.oracles import DTYPES, FLOAT32, GROUPS, Case, error

in_both = pytest.mark.parametrize("dtype", DTYPES)
_YARN = ("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def rope_config(case: Case) -> MlaConfig:
    """Widths whose sum is the 40 behind the fixture's 1/sqrt(40)."""
    param = {name: case[f"param/{name}"].item() for name in case.below("param/")}
    yarn = {f"yarn_{name}": param[name] for name in _YARN if name in param}
    if "original_max_position_embeddings" in param:
        yarn["yarn_original_length"] = int(param["original_max_position_embeddings"])
    return MlaConfig(rope_dim=16, nope_dim=24, rope_theta=param["rope_theta"], rope="half", **yarn)


def rotated(
    rows: np.ndarray, positions: np.ndarray, cfg: MlaConfig, pairs: str, dtype
) -> np.ndarray:
    """[B, N, T, R] turned at its positions, which stand far apart in one long row of zeros."""
    B, N, _, R = rows.shape
    row = np.zeros((B, positions.max() + 1, N, R), np.float32)
    row[:, positions] = rows.swapaxes(1, 2)
    turn = jax.jit(rope.rotate, static_argnums=(1, 2))
    out = turn(jnp.asarray(row, dtype), cfg, pairs)[:, positions].astype(FLOAT32)
    return np.asarray(out).swapaxes(1, 2)


@in_both
@pytest.mark.parametrize("group", GROUPS["rope"]["rotation"])
def test_rotation(group, dtype):
    """The fixture's angles are float32 products: at position 100,000 they are off by 7e-4, where
    ours, in float64, are right. Its own float32 frequencies give its cosines back."""
    case = Case("rope", group)
    cfg, positions = rope_config(case), case["positions"][0]
    freq, magnitude = rope.frequencies(cfg)
    case.check("inv_freq", freq, 2e-6)
    case.check("attention_scaling", magnitude, 1e-6)
    scale = (cfg.nope_dim + cfg.rope_dim) ** -0.5 * rope.softmax_scale_factor(cfg)
    case.check("mla_softmax_scale", scale, 1e-6)
    angle32 = np.tile(positions[:, None].astype(FLOAT32) * case["inv_freq"], 2)
    assert error(magnitude * np.cos(angle32)[None], case["cos"]) <= 2e-6
    assert error(magnitude * np.sin(angle32)[None], case["sin"]) <= 2e-6

    unit = np.zeros((1, 1, len(positions), 16), np.float32)
    unit[..., :8] = 1
    cos_sin, near = rotated(unit, positions, cfg, "half", dtype)[:, 0], positions <= 64
    for at, name, fn in ((slice(8), "cos", np.cos), (slice(8, None), "sin", np.sin)):
        exact = magnitude * fn(positions[:, None] * freq)[None]
        most = 2e-6 if dtype == FLOAT32 else 1e-2
        assert error(cos_sin[..., at], exact) <= most
        assert error(cos_sin[:, near, at], case[name][:, near, :8]) <= most
        np.testing.assert_array_equal(case[name][..., :8], case[name][..., 8:])
    # The product of a position and a frequency is rounded by 2^-24 of it at most, twice.
    limits = np.minimum(2e-6 + positions * 2.0**-23, 5e-4) if dtype == FLOAT32 else 1e-2
    for name in ("q", "k"):
        for pairs, suffix in (("half", "half"), ("interleaved", "interleave")):
            got = rotated(case[name], positions, cfg, pairs, dtype)
            if pairs == "interleaved":  # transformers leaves first members, then second ones
                got = np.concatenate([got[..., 0::2], got[..., 1::2]], -1)
            want = case[f"{name}_{suffix}"]
            off = np.abs(got - want).max((0, 1, 3)) / np.abs(want).max()
            assert (off <= limits).all(), (name, pairs, off)
    case.done()


@in_both
@pytest.mark.parametrize("group", GROUPS["router"]["router"])
def test_router(group, dtype):
    """Float32 whatever the activations are: bfloat16 activations give what the same numbers give
    in float32, and those of the fixture its choice."""
    case = Case("router", group)
    E, top_k, num_groups, top_groups, renormalize = case["conf"].tolist()
    cfg = MoeConfig(
        num_experts=E, top_k=top_k, num_groups=num_groups, top_groups=top_groups,
        renormalize=bool(renormalize), route_scale=float(case["scale"]), score="sigmoid",
    )  # fmt: skip
    router = Router(case["x"].shape[-1], cfg, 0.02, nnx.Rngs(0))
    router.bias[...] = jnp.asarray(case["bias"])
    graph, params, rest = nnx.split(router, nnx.Param, ...)

    def outputs(x, weight):
        module = nnx.merge(graph, jax.tree.map(lambda _: weight.T, params), rest)
        ids, weights, _ = module(x[None])
        order = jnp.argsort(ids[0], -1)  # the fixture lists experts ascending
        weights = jnp.take_along_axis(weights[0], order, -1)
        loss = jnp.sum(weights * case["dtopk_w"])
        return loss, (jnp.take_along_axis(ids[0], order, -1), weights)

    grad = jax.jit(jax.value_and_grad(outputs, argnums=(0, 1), has_aux=True))
    (_, (ids, weights)), (dx, dweight) = grad(jnp.asarray(case["x"]), jnp.asarray(case["weight"]))
    if dtype != FLOAT32:
        low = jnp.asarray(case["x"], dtype)
        (_, (low_ids, low_weights)), (low_dx, low_dweight) = grad(low, case["weight"])
        (_, same), (_, same_dweight) = grad(low.astype(FLOAT32), case["weight"])
        jax.tree.map(np.testing.assert_array_equal, (low_ids, low_weights), same)
        np.testing.assert_array_equal(low_dweight, same_dweight)
        assert low_weights.dtype == low_dweight.dtype == FLOAT32 and low_dx.dtype == dtype
    np.testing.assert_array_equal(ids, case["topk_idx_sorted"])
    case.check("topk_w", weights, 1e-5)
    case.check("dx", dx, 2e-5)
    case.check("dweight", dweight, 2e-5)
    logits = jnp.matmul(case["x"], case["weight"].T, precision="highest")
    case.check("logits", logits, 1e-5)
    options = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
    chosen, _ = route(jnp.asarray(case["logits"]), jnp.asarray(case["bias"]), **options)
    np.testing.assert_array_equal(jnp.sort(chosen, -1), case["topk_idx_sorted"])
    load_E = np.bincount(np.ravel(ids), minlength=E)
    np.testing.assert_array_equal(load_E, case["tokens_per_expert"])
    stepped = bias_step(jnp.asarray(load_E), jnp.asarray(case["bias"]), 1e-3)
    case.check("bias_after_sign_step_rate_1e-3", stepped, 1e-6)
    case.done()


@in_both
@pytest.mark.parametrize("group", GROUPS["situ"]["situ"])
def test_situ(group, dtype):
    case = Case("situ", group)
    # Without the second bound the up stays linear, as below a bound that nothing comes near.
    betas = float(case["beta"]), float(case["linear_beta_or_0"]) or 2.0**14
    gate, up = (jnp.asarray(case[name], dtype) for name in ("gate", "up"))
    out, pullback = jax.vjp(lambda gate, up: situ(gate, up, *betas), gate, up)
    most = 2e-6 if dtype == FLOAT32 else 1e-2
    dgate, dup = pullback(jnp.asarray(case["do"], dtype))
    for name, actual in (("y", out), ("dgate", dgate), ("dup", dup)):
        case.check(name, actual, most)
    case.done()
