"""Schedules at their edges, and the branch of a run into its decay."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import OptimConfig
from moejax.optim import make_schedule


def values(num_steps, **fields):
    schedule = jax.jit(make_schedule(OptimConfig(**fields), num_steps))
    return np.array([schedule(step) for step in range(num_steps + 2)])


def test_warm_up_is_a_line_that_never_starts_at_zero():
    for name in ("cosine", "wsd", "constant"):
        got = values(100, schedule=name, warmup_fraction=0.1)
        np.testing.assert_allclose(got[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert values(100, warmup_fraction=0.0)[0] == 1.0


def test_cosine_falls_to_the_minimum_ratio_and_stays():
    got = values(100, schedule="cosine", warmup_fraction=0.1, min_ratio=0.2)
    assert got[10] == 1.0
    assert got[55] == pytest.approx(0.6, rel=1e-6)
    assert got[99] > 0.2
    np.testing.assert_allclose(got[100:], 0.2, rtol=1e-6)
    assert (np.diff(got[10:101]) < 0).all()


def test_wsd_holds_then_falls_on_a_line():
    got = values(100, schedule="wsd", warmup_fraction=0.05, decay_fraction=0.2, min_ratio=0.0)
    np.testing.assert_array_equal(got[5:81], 1.0)
    np.testing.assert_allclose(got[80:101], 1 - np.arange(21) / 20, atol=1e-6)


def test_decay_branches_from_any_step_of_a_longer_run():
    trunk = values(1000, schedule="wsd", warmup_fraction=0.01)
    branch = values(340, schedule="wsd", warmup_fraction=0.01, decay_start=300, min_ratio=0.0)
    np.testing.assert_array_equal(trunk[10:300], branch[10:300])
    np.testing.assert_allclose(branch[300:341], 1 - np.arange(41) / 40, atol=1e-6)


def test_constant_stays_at_one():
    np.testing.assert_array_equal(values(50, schedule="constant", warmup_fraction=0.0), 1.0)


def test_traced_step_and_range():
    schedule = make_schedule(OptimConfig(), 7)
    got = jax.vmap(schedule)(jnp.arange(20))
    assert got.dtype == jnp.float32
    assert float(got.min()) > 0 and float(got.max()) <= 1


def test_settings_that_cannot_work_are_named():
    with pytest.raises(ValueError, match="num_steps=0"):
        make_schedule(OptimConfig(), 0)
    with pytest.raises(ValueError, match="decay_start=100 is not before the end .* step 100"):
        make_schedule(OptimConfig(schedule="wsd", decay_start=100), 100)
    with pytest.warns(UserWarning, match="decay_start=5 has no effect"):
        make_schedule(OptimConfig(schedule="cosine", decay_start=5), 100)
