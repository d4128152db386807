"""The expert layer: SiTU, latent and plain experts, combine weights, padding, capacity."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import FfnConfig, ModelConfig, MoeConfig
from moejax.layers.ffn import Glu, situ, swiglu
from moejax.layers.moe.latent_moe import LatentMoe
from tests.models.running import FAST_COMPILE, filled
from tests.reference import decoder as reference

B, T, D = 2, 9, 8
MOE = {"num_experts": 6, "top_k": 2, "expert_dim": 5, "latent_dim": 0, "num_shared": 0}
ONES = np.ones((B, T), np.int32)


def make(seed: int = 0, ffn: FfnConfig | None = None, **moe) -> LatentMoe:
    cfg = MoeConfig(**{**MOE, **moe})
    std, ffn = D**-0.5, ffn or FfnConfig()
    return filled(lambda: LatentMoe(D, cfg, ffn, 1e-5, std, nnx.Rngs(params=0)), std, seed)


def inputs(seed: int = 0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((B, T, D)).astype(dtype)


def call(layer, x, segments=ONES):
    graph, state = nnx.split(layer)
    fn = jax.jit(lambda s, x, seg: nnx.merge(graph, s)(x, seg), compiler_options=FAST_COMPILE)
    out, aux = fn(state, x, segments)
    return np.asarray(out), jax.tree.map(np.asarray, aux)


def weights_of(layer: LatentMoe) -> dict:
    """The layer's arrays as the reference reads them, in float64."""
    tree = nnx.to_pure_dict(nnx.split(layer)[1])
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


def reference_config(layer: LatentMoe, ffn: FfnConfig | None = None) -> ModelConfig:
    return ModelConfig(dim=D, moe=layer.cfg, ffn=ffn or FfnConfig())


# ---- activations


def test_situ_golden_numbers():
    """M7."""
    with jax.enable_x64(True):
        f = lambda *gu: situ(*(jnp.asarray([a], float) for a in gu)).item()  # noqa: E731
        assert f(1, 1) == pytest.approx(0.715817828, abs=1e-9)
        assert f(2, -3) == pytest.approx(-4.861066551, abs=1e-9)
        assert f(-1, 2) == pytest.approx(-0.525828896, abs=1e-9)
        gates = jnp.linspace(-3, 3, 600_001)
        gate_part = 4 * jnp.tanh(gates / 4) * jax.nn.sigmoid(gates)
        # As situ gives it, with the linear part divided out.
        curve = situ(gates, jnp.full_like(gates, 1.0)) / (25 * np.tanh(1 / 25))
        np.testing.assert_allclose(curve, gate_part, rtol=1e-12, atol=1e-15)
        assert float(curve.min()) == pytest.approx(-0.269769, abs=1e-6)
        assert float(gates[jnp.argmin(curve)]) == pytest.approx(-1.218756, abs=2e-5)


def test_situ_is_bounded_and_tends_to_swiglu():
    with jax.enable_x64(True):
        g, u = (jnp.asarray(np.random.default_rng(s).standard_normal(200) * 50) for s in (0, 1))
        assert float(jnp.abs(situ(g, u)).max()) < 100
        small = (g / 50, u / 50)
        np.testing.assert_allclose(situ(*small, 1e5, 1e5), swiglu(*small), rtol=1e-8)


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
def test_activations_in_bfloat16_are_float32_inside(activation):
    fn = situ if activation == "situ" else swiglu
    g, u = (jnp.asarray(np.random.default_rng(s).standard_normal(99), jnp.bfloat16) for s in (0, 1))
    want = fn(g.astype(jnp.float32), u.astype(jnp.float32)).astype(jnp.bfloat16)
    got = fn(g, u)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


# ---- the layer


def test_identity_maps_make_the_latent_layer_plain():
    """M1."""
    plain, latent = make(), make(latent_dim=D, latent_norm=False)
    for name in ("router", "experts"):
        setattr(latent, name, getattr(plain, name))
    latent.latent_down[...] = latent.latent_up[...] = jnp.eye(D)
    x = inputs()
    np.testing.assert_allclose(call(latent, x)[0], call(plain, x)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shared", [0, 2])
def test_all_experts_with_equal_scores_are_averaged(shared):
    """M4: r = gamma times the mean over all experts."""
    layer = make(top_k=6, route_scale=1.7, num_shared=shared)
    layer.router.weight[...] = jnp.zeros_like(layer.router.weight[...])
    x = inputs()
    w = weights_of(layer)
    cfg = reference_config(layer)
    experts = [
        reference.glu(cfg, w["experts"]["gate_up"][e], w["experts"]["down"][e], np.float64(x))
        for e in range(6)
    ]
    want = 1.7 * np.mean(experts, axis=0)
    if shared:
        want = want + reference.glu(cfg, w["shared"]["gate_up"], w["shared"]["down"], np.float64(x))
    np.testing.assert_allclose(call(layer, x)[0], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("latent_norm", [True, False])
def test_the_latent_norm_takes_the_scale_away(latent_norm):
    """M5: with it, gamma changes nothing; without it, the output is proportional to gamma."""
    outs = []
    for scale in (1.0, 3.0):
        layer = make(latent_dim=4, latent_norm=latent_norm, route_scale=scale, seed=1)
        layer.experts.down[...] = layer.experts.down[...] * 100  # far above the norm's epsilon
        outs.append(call(layer, inputs())[0])
    want = outs[0] if latent_norm else 3 * outs[0]
    np.testing.assert_allclose(outs[1], want, rtol=2e-4, atol=2e-4 * np.max(np.abs(want)))


def test_tokens_do_not_see_each_other():
    """M6: any order of the tokens gives the same outputs in that order."""
    layer, x = make(latent_dim=4, num_shared=1), inputs()
    order = np.random.default_rng(3).permutation(T)
    np.testing.assert_allclose(
        call(layer, x[:, order])[0], call(layer, x)[0][:, order], rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("hot", [False, True])
def test_equals_the_loop_over_experts(hot):
    """M6, also where every token wants the same experts and others get none."""
    layer = make(latent_dim=4, num_shared=1, seed=2)
    if hot:
        layer.router.bias[...] = jnp.asarray([5.0, 0, 0, 0, 4.0, 0])
    x = inputs()
    want = [
        reference.moe(reference_config(layer), weights_of(layer), np.float64(row), {}) for row in x
    ]
    out, aux = call(layer, x)
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)
    assert aux["load"].sum() == B * T * 2
    if hot:
        np.testing.assert_array_equal(aux["load"], [B * T, 0, 0, 0, B * T, 0])


def test_combine_weights_get_the_dot_product_with_the_expert():
    """M10: dp_i = <dr, E_i(x)>, seen through the router's logits; no gradient to the bias."""
    with jax.enable_x64(True):
        layer = make(seed=4)
        x, dr = inputs(dtype=np.float64), inputs(5, np.float64)
        graph, state = nnx.split(layer)

        def fn(state):
            out, _ = nnx.merge(graph, state)(jnp.asarray(x), jnp.asarray(ONES))
            return jnp.sum(out * dr)

        grads = jax.jit(jax.grad(fn), compiler_options=FAST_COMPILE)(state)
    w, cfg = weights_of(layer), reference_config(layer)
    want = np.zeros((D, 6))
    for b in range(B):
        for t in range(T):
            ids, p, score = reference.route_token(cfg, x[b, t] @ w["router"]["weight"], np.zeros(6))
            experts = w["experts"]
            dp = [
                dr[b, t] @ reference.glu(cfg, experts["gate_up"][e], experts["down"][e], x[b, t])
                for e in ids
            ]
            for e, dp_e in zip(ids, dp, strict=True):
                # p = s_e / sum s, s = sigmoid(logit)
                ds = (dp_e - np.dot(p, dp)) / score[ids].sum()
                want[:, e] += ds * score[e] * (1 - score[e]) * x[b, t]
    np.testing.assert_allclose(grads["router"]["weight"][...], want, rtol=1e-5, atol=1e-6)
    assert not np.any(grads["router"]["bias"][...])


def test_padding_goes_to_no_expert_and_is_not_counted():
    layer, x = make(num_shared=1, balance="quantile"), inputs()
    segments = np.array([[0] * 4 + [1] * 5, [1] * 9], np.int32)
    out, aux = call(layer, x, segments)
    garbage = x.copy()
    garbage[0, :4] = 1e3
    other, other_aux = call(layer, garbage, segments)
    np.testing.assert_array_equal(out[0, 4:], other[0, 4:])
    np.testing.assert_array_equal(out[1], other[1])
    assert aux["load"].sum() == 2 * (5 + 9)
    assert (aux["bias_counts"].sum(-1) == 5 + 9).all()
    for name in aux:
        np.testing.assert_array_equal(aux[name], other_aux[name])


# ---- capacity


@functools.cache
def capacity_case():
    layer = make(seed=6)
    layer.router.bias[...] = jnp.asarray([0.6, 0.3, 0, 0, 0, 0])  # some experts are crowded
    segments = np.array([[0] * 2 + [1] * 7, [1] * 4 + [2] * 5], np.int32)
    return layer, inputs(7), segments


@pytest.mark.parametrize("factor", [0.4, 1.0, 1.4, 3.0])
def test_capacity_drops_what_a_count_says(factor):
    """An expert takes the earliest ceil(factor T A / E) tokens of a row; the rest is left out."""
    layer, x, segments = capacity_case()
    limited = make(seed=6, capacity_factor=factor)
    limited.router.bias[...] = layer.router.bias[...]
    out, aux = call(limited, x, segments)
    w, cfg = weights_of(layer), reference_config(layer)
    capacity, dropped = int(np.ceil(factor * T * 2 / 6)), 0
    for b in range(B):
        used = np.zeros(6, int)
        for t in range(T):
            if segments[b, t] == 0:
                continue
            logits = np.float64(x[b, t]) @ w["router"]["weight"]
            ids, p, _ = reference.route_token(cfg, logits, w["router"]["bias"])
            want = np.zeros(D)
            for e, p_e in zip(ids, p, strict=True):
                if used[e] < capacity:
                    gate_up, down = w["experts"]["gate_up"][e], w["experts"]["down"][e]
                    want += p_e * reference.glu(cfg, gate_up, down, np.float64(x[b, t]))
                dropped += used[e] >= capacity
                used[e] += 1
            np.testing.assert_allclose(out[b, t], want, rtol=0, atol=2e-5)
    assert aux["dropped"] == dropped
    assert (dropped > 0) == (factor < 3)
    assert aux["load"].sum() == 2 * (segments > 0).sum()  # what the router asked for


def test_without_a_capacity_nothing_is_dropped():
    layer, x, segments = capacity_case()
    assert call(layer, x, segments)[1]["dropped"] == 0


@pytest.mark.parametrize("activation", ["situ", "swiglu"])
def test_dense_feed_forward(activation):
    ffn = FfnConfig(activation=activation, situ_beta=1.5, situ_linear_beta=3.0)
    layer, x = Glu(D, 7, ffn, 1.0, nnx.Rngs(params=0)), inputs()
    cfg = reference_config(make(), ffn)
    want = reference.glu(
        cfg, np.float64(layer.gate_up[...]), np.float64(layer.down[...]), np.float64(x)
    )
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, rtol=0, atol=1e-4)
