"""Rotary positions and YaRN, against transformers' DeepseekV3RotaryEmbedding among others."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ConfigError, MlaConfig
from moejax.layers import rope

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "ops" / "rope.npz"
CASES = ("default", "yarn", "yarn_mscale")


def load(case: str) -> tuple[dict[str, np.ndarray], MlaConfig]:
    with np.load(FIXTURE) as file:
        data = {k.removeprefix(f"{case}/"): file[k] for k in file.files if k.startswith(f"{case}/")}
    param = {k.removeprefix("param/"): v.item() for k, v in data.items() if k.startswith("param/")}
    yarn = {
        f"yarn_{ours}": param[theirs]
        for ours, theirs in (
            ("factor", "factor"), ("beta_fast", "beta_fast"), ("beta_slow", "beta_slow"),
            ("mscale", "mscale"), ("mscale_all_dim", "mscale_all_dim"),
        )
        if theirs in param
    }  # fmt: skip
    if "original_max_position_embeddings" in param:
        yarn["yarn_original_length"] = int(param["original_max_position_embeddings"])
    # Widths whose sum is the 40 behind the fixture's 1/sqrt(40).
    cfg = MlaConfig(rope_dim=16, nope_dim=24, rope_theta=param["rope_theta"], rope="half", **yarn)
    return data, cfg


@pytest.mark.parametrize("case", CASES)
def test_frequencies_and_magnitudes(case):
    data, cfg = load(case)
    freq, magnitude = rope.frequencies(cfg)
    np.testing.assert_allclose(freq, data["inv_freq"], rtol=2e-6)
    np.testing.assert_allclose(magnitude, data["attention_scaling"], rtol=1e-6)
    scale = (cfg.nope_dim + cfg.rope_dim) ** -0.5 * rope.softmax_scale_factor(cfg)
    np.testing.assert_allclose(scale, data["mla_softmax_scale"], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_rotation(case, pairs):
    data, cfg = load(case)
    positions = data["positions"][0]
    keep = positions <= 4096  # beyond, the fixture's float32 angle is off by itself
    for name in ("q", "k"):
        rows = np.zeros((1, 4097, data[name].shape[1], cfg.rope_dim), np.float32)
        rows[:, positions[keep]] = data[name].transpose(0, 2, 1, 3)[:, keep]
        got = np.asarray(rope.rotate(jnp.asarray(rows), cfg, pairs))[:, positions[keep]]
        want = data[f"{name}_{'half' if pairs == 'half' else 'interleave'}"]
        want = want.transpose(0, 2, 1, 3)[:, keep]
        if pairs == "interleaved":  # transformers leaves first members, then second ones
            got = np.concatenate([got[..., 0::2], got[..., 1::2]], -1)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-3)


@pytest.mark.parametrize("pairs", ["half", "interleaved"])
def test_scores_see_differences_of_positions_only(pairs):
    cfg = MlaConfig(rope_dim=8, rope=pairs)
    rng = np.random.default_rng(0)
    q, k = (np.broadcast_to(rng.standard_normal(8), (1, 50, 1, 8)).astype(np.float32) for _ in "qk")
    q, k = (np.asarray(rope.rotate(jnp.asarray(a), cfg, pairs))[0, :, 0] for a in (q, k))
    scores = q @ k.T
    for shift in (0, 1, 7):
        np.testing.assert_allclose(np.diagonal(scores, -shift), scores[shift, 0], atol=1e-5)
    assert np.std(scores[:, 0]) > 0.1


def test_no_rotation_returns_what_it_got():
    x = jnp.ones((1, 3, 2, 4))
    assert rope.rotate(x, MlaConfig(rope_dim=4), "none") is x
    assert rope.softmax_scale_factor(MlaConfig(yarn_factor=8.0, yarn_mscale_all_dim=1.0)) == 1.0


def test_odd_width_cannot_be_rotated():
    with pytest.raises(ConfigError, match="odd"):
        MlaConfig(rope_dim=5, rope="half")
    MlaConfig(rope_dim=5)  # without rotation any width will do
