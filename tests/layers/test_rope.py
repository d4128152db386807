"""Rotary positions: what holds whatever the frequencies."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ConfigError, MlaConfig
from moejax.layers import rope


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
