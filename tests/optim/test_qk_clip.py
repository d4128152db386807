"""QK-clip on MLA weights: the logits of a head shrink to the bound, others stay bit-equal."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.optim import clip_key, clip_query, qk_clip_factors

C, Q, N, H, R = 5, 6, 3, 4, 2


def random(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def logits(q_b, k_b, q_latent, kv_latent, k_rope):
    q = jnp.einsum("tq,qnh->tnh", q_latent, q_b)
    k = jnp.einsum("sc,cnh->snh", kv_latent, k_b)
    content = jnp.einsum("tnh,snh->nts", q[..., :H], k)
    return content + jnp.einsum("tnr,sr->nts", q[..., H:], k_rope)


def test_small_logits_leave_weights_bit_equal():
    gamma = qk_clip_factors(jnp.array([0.0, -3.0, 100.0]), 100.0)
    np.testing.assert_array_equal(gamma, 1.0)
    q_b, k_b = random(Q, N, H + R), random(C, N, H, seed=1)
    np.testing.assert_array_equal(clip_query(q_b, gamma, H), q_b)
    np.testing.assert_array_equal(clip_key(k_b, gamma), k_b)


def test_logit_of_400_halves_content_and_quarters_rope():
    gamma = qk_clip_factors(jnp.array([50.0, 400.0, 100.0]), 100.0)
    q_b, k_b = random(Q, N, H + R), random(C, N, H, seed=1)
    q_new, k_new = clip_query(q_b, gamma, H), clip_key(k_b, gamma)
    np.testing.assert_array_equal(q_new[:, 1, :H], 0.5 * q_b[:, 1, :H])
    np.testing.assert_array_equal(q_new[:, 1, H:], 0.25 * q_b[:, 1, H:])
    np.testing.assert_array_equal(k_new[:, 1], 0.5 * k_b[:, 1])
    np.testing.assert_array_equal(q_new[:, ::2], q_b[:, ::2])
    np.testing.assert_array_equal(k_new[:, ::2], k_b[:, ::2])


def test_new_largest_logit_is_the_bound():
    q_b, k_b = random(Q, N, H + R), random(C, N, H, seed=1)
    rest = random(7, Q, seed=2), random(8, C, seed=3), random(8, R, seed=4)
    before = logits(q_b, k_b, *rest).max(axis=(1, 2))
    q_b = q_b * (jnp.array([400.0, 90.0, 150.0]) / before)[:, None]
    largest = logits(q_b, k_b, *rest).max(axis=(1, 2))
    gamma = qk_clip_factors(largest, 100.0)
    after = logits(clip_query(q_b, gamma, H), clip_key(k_b, gamma), *rest).max(axis=(1, 2))
    np.testing.assert_allclose(after, [100.0, 90.0, 100.0], rtol=1e-5)


def test_stacked_layers_have_their_own_factors():
    q_b, k_b = random(2, 3, Q, N, H + R), random(2, 3, C, N, H, seed=1)
    gamma = qk_clip_factors(100.0 * jnp.exp(random(2, 3, N, seed=2)), 100.0)
    q_new, k_new = clip_query(q_b, gamma, H), clip_key(k_b, gamma)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(q_new[i, j], clip_query(q_b[i, j], gamma[i, j], H))
        np.testing.assert_array_equal(k_new[i, j], clip_key(k_b[i, j], gamma[i, j]))


def test_head_narrower_than_its_content_is_refused():
    with pytest.raises(ValueError, match="nope_dim=9 must be from 0 to the head width 6"):
        clip_query(random(Q, N, H + R), jnp.ones(N), 9)
