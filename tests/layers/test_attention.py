"""MLA, DSA and KDA layers: the statements that hold whatever the weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.config import ConfigError, DsaConfig, KdaConfig, MlaConfig
from moejax.layers.dsa import Dsa
from moejax.layers.kda import Kda, init_dt_bias
from moejax.layers.mla import Mla
from moejax.layers.param import Balance
from moejax.optim import clip_key, clip_query, qk_clip_factors
from tests.models.running import FAST_COMPILE, filled, forward, lively, row_of, stack_rows
from tests.models.small_configs import small

B, T, D = 2, 11, 16
MLA = MlaConfig(num_heads=3, q_latent=10, kv_latent=9, nope_dim=6, rope_dim=4, value_dim=5)
DSA = DsaConfig(num_heads=2, head_dim=6, top_k=4)
SEGMENTS = np.array([[1] * 4 + [2] * 7, [0] * 2 + [1] * 9], np.int32)


def replace(cfg, **changes):
    return type(cfg)(**{**{f: getattr(cfg, f) for f in cfg.__dataclass_fields__}, **changes})


def make(cls, *configs, seed=0, **options):
    """A layer with standard normal / sqrt(D) maps in float32."""
    std = D**-0.5
    return filled(lambda: cls(D, *configs, std, rngs=nnx.Rngs(params=0), **options), std, seed)


def inputs(dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal((B, T, D)).astype(dtype)


def call(layer, x, segments=SEGMENTS):
    """Output and measurements of a layer, compiled."""
    graph, state = nnx.split(layer)
    fn = jax.jit(lambda s, x, seg: nnx.merge(graph, s)(x, seg), compiler_options=FAST_COMPILE)
    return fn(state, x, segments)


def without_indexer(layer: Dsa) -> Mla:
    """The MLA layer with the same weights."""
    dense = make(Mla, layer.cfg)
    _, state = nnx.split(layer)
    kept = {k: v for k, v in nnx.to_pure_dict(state).items() if k != "indexer"}
    graph, own = nnx.split(dense)
    nnx.replace_by_pure_dict(own, kept)
    return nnx.merge(graph, own)


@pytest.mark.parametrize("stage", ["sparse", "frozen", "warmup"])
@pytest.mark.parametrize("rope", ["none", "interleaved"])
def test_enough_keys_make_dsa_dense_and_absorbed_equal_to_expanded(stage, rope, monkeypatch):
    """D1, D2: values and gradients of the main path, float64."""
    monkeypatch.setattr(Dsa, "masked_up_to", lambda layer: 0)
    with jax.enable_x64(True):
        layer = make(Dsa, replace(MLA, rope=rope), replace(DSA, top_k=T, stage=stage))
        dense, x = without_indexer(layer), jnp.asarray(inputs())
        weight = jnp.asarray(inputs(seed=1))

        def value_and_grads(layer):
            graph, state = nnx.split(layer)

            def fn(state, x):
                return jnp.sum(weight * nnx.merge(graph, state)(x, jnp.asarray(SEGMENTS))[0])

            fn = jax.jit(jax.value_and_grad(fn, argnums=(0, 1)), compiler_options=FAST_COMPILE)
            value, (state_grad, x_grad) = fn(state, x)
            return value, nnx.to_pure_dict(state_grad), x_grad

        value, grads, x_grad = value_and_grads(layer)
        want, want_grads, want_x_grad = value_and_grads(dense)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    np.testing.assert_allclose(x_grad, want_x_grad, rtol=0, atol=1e-12)
    grads.pop("indexer")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)  # float32 leaves
    jax.tree.map(close, grads, want_grads)


def test_masked_and_gathered_keys_give_the_same_numbers(monkeypatch):
    """Output, the indexer's loss, largest logits and every gradient, in float64."""
    with jax.enable_x64(True):
        layer = make(Dsa, MLA, replace(DSA, stage="sparse"), track_max_logit=True)
        x, weight = jnp.asarray(inputs()), jnp.asarray(inputs(seed=1))
        graph, state = nnx.split(layer)

        def results(limit):
            monkeypatch.setattr(Dsa, "masked_up_to", lambda layer: limit)

            def loss(state, x):
                out, aux = nnx.merge(graph, state)(x, jnp.asarray(SEGMENTS))
                return jnp.sum(weight * out) + aux["indexer_kl"], (out, aux)

            fn = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
            return jax.tree.leaves(fn(state, x))

        assert DSA.top_k < T <= layer.masked_up_to()
        masked, gathered = results(T), results(0)
    for a, b in zip(masked, gathered, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)  # the leaves are float32


@pytest.mark.parametrize("make_layer", [lambda: make(Mla, MLA), lambda: make(Dsa, MLA, DSA)])
def test_without_positions_the_order_of_past_keys_is_free(make_layer):
    """D9: the last query does not see how the tokens before it are arranged."""
    x, order = inputs(np.float32), np.random.default_rng(2).permutation(T - 1)
    shuffled = x.copy()
    shuffled[:, : T - 1] = x[:, order]
    one_document = np.ones((B, T), np.int32)
    got, _ = call(make_layer(), shuffled, one_document)
    want, _ = call(make_layer(), x, one_document)
    np.testing.assert_allclose(got[:, -1], want[:, -1], rtol=0, atol=2e-6)
    assert np.max(np.abs(got[:, :-1] - want[:, :-1])) > 0.1


def test_with_rotation_the_order_matters():
    x = inputs(np.float32)
    shuffled = x.copy()
    shuffled[:, :-1] = x[:, -2::-1]
    layer, one_document = make(Mla, replace(MLA, rope="half")), np.ones((B, T), np.int32)
    difference = call(layer, shuffled, one_document)[0] - call(layer, x, one_document)[0]
    assert np.max(np.abs(difference[:, -1])) > 0.01


@pytest.mark.parametrize("kind", ["elementwise", "head"])
@pytest.mark.parametrize(("gate", "factor"), [(0.0, 0.5), (1e4, 1.0)])
def test_output_gate_at_its_ends(kind, gate, factor):
    """D10: a zero map halves the output, logits of + infinity leave it as it is."""
    x = np.abs(inputs(np.float32))
    gated = make(Mla, replace(MLA, output_gate=kind))
    gated.gate[...] = jnp.full_like(gated.gate[...], gate)
    free = make(Mla, replace(MLA, output_gate="none"))
    for name in ("q_a", "q_b", "kv_a", "k_b", "v_b", "o"):
        getattr(free, name)[...] = getattr(gated, name)[...]
    np.testing.assert_allclose(call(gated, x)[0], factor * call(free, x)[0], rtol=1e-6, atol=1e-7)


def test_the_first_token_of_a_document_reads_its_own_value():
    """D5 in the layer: its output is the gated projection of its own value."""
    layer, x = make(Dsa, MLA, DSA), inputs(np.float32)
    alone, _ = call(layer, x[:, 4:5], np.ones((B, 1), np.int32))
    np.testing.assert_allclose(call(layer, x)[0][0, 4], alone[0, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mla", "dsa"])
@pytest.mark.parametrize("q_latent", [10, 0])
def test_qk_clip_brings_the_largest_logit_to_the_bound(kind, q_latent):
    """D12 in a layer: heads above tau come to tau, the others keep every bit."""
    if kind == "dsa" and not q_latent:
        pytest.raises(ConfigError, make, Dsa, replace(MLA, q_latent=0), DSA)
        return
    cfg, options = replace(MLA, q_latent=q_latent), {"track_max_logit": True}
    layer = make(Mla, cfg, **options) if kind == "mla" else make(Dsa, cfg, DSA, **options)
    x = inputs(np.float32)
    before = call(layer, x)[1]["max_logit"]
    tau = float(np.sort(before)[0] + np.sort(before)[1]) / 2  # two heads above, one below
    query = layer.q_b if q_latent else layer.q
    old_query, old_key, gamma = query[...], layer.k_b[...], qk_clip_factors(before, tau)
    query[...] = clip_query(old_query, gamma, cfg.nope_dim)
    layer.k_b[...] = clip_key(old_key, gamma)
    after = call(layer, x)[1]["max_logit"]
    np.testing.assert_allclose(after, np.minimum(before, tau), rtol=1e-5)
    quiet = int(np.argmin(before))
    np.testing.assert_array_equal(query[...][:, quiet], old_query[:, quiet])
    np.testing.assert_array_equal(layer.k_b[...][:, quiet], old_key[:, quiet])


def test_settings_an_indexer_cannot_have():
    with pytest.raises(ConfigError, match="rope_dim"):
        make(Dsa, replace(MLA, rope="half", rope_dim=8), replace(DSA, rope="half"))


# ---- who learns from which loss


@functools.cache
def separate_gradients(stage: str):
    """Gradients of the language loss and of the indexer's, by dotted name.

    The model has two DSA layers.
    """
    parts, params, balance = lively(small("dsa", 2, dsa={"stage": stage, "top_k": 5}))
    rng = np.random.default_rng(0)
    rows = stack_rows([row_of([rng.integers(0, 50, n, dtype=np.int32) for n in (13, 17)], 30)])

    def losses(params, balance, rows):
        _, loss_B, measured = forward(parts, params, balance, rows)
        return loss_B.sum(), measured["indexer_kl"].sum()

    def both(params, balance, rows):
        _, pull = jax.vjp(lambda p: losses(p, balance, rows), params)
        return pull((1.0, 0.0))[0], pull((0.0, 1.0))[0]

    out = jax.jit(both, compiler_options=FAST_COMPILE)(params, balance, rows)
    names = [info.name for info in jax.tree.leaves(parts.infos)]
    return [dict(zip(names, jax.tree.leaves(grads), strict=True)) for grads in out]


@pytest.mark.parametrize("stage", ["sparse", "warmup", "frozen"])
def test_language_loss_and_indexer_loss_train_different_weights(stage):
    """D8: exact zeros on the other side, none on the own side."""
    language, indexer = separate_gradients(stage)
    for name in language:
        of_indexer = ".indexer." in name
        untouched = indexer if not of_indexer else language
        assert not np.any(untouched[name]), name
        learns = np.any(indexer[name] if of_indexer else language[name])
        # Layer 0's attention has one source only, whatever its depth query.
        expected = stage != "frozen" if of_indexer else not name.startswith("stack0.run0.attn_mix")
        assert learns == expected, name


# ---- KDA


def test_initial_decay():
    """K8, section 2.3: dt in [1e-3, 0.1]; the bounded gate starts with alpha in [0.621, 0.995]."""
    dt_bias = np.asarray(init_dt_bias(jax.random.key(0), (64, 128)), np.float64)
    dt = np.logaddexp(0, dt_bias)
    assert 1e-3 * 0.999 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.1001
    # Log-uniform: half of them below the geometric middle, 0.01.
    assert abs(np.mean(dt < 0.01) - 0.5) < 0.03
    alpha = np.exp(-5 / (1 + np.exp(-dt_bias)))
    np.testing.assert_allclose(alpha, np.exp(-5 * (1 - np.exp(-dt))), rtol=1e-6)
    assert 0.6214 - 1e-3 < alpha.min() < 0.65 and 0.99 < alpha.max() < 0.9951


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_initial_rates_of_heads(gate):
    cfg = KdaConfig(num_heads=256, head_dim=2, value_head_dim=2, gate=gate)
    layer = Kda(D, cfg, 1e-5, 0.02, nnx.Rngs(params=0))
    a_log = np.asarray(layer.a_log[...])
    assert layer.dt_bias[...].shape == (256, 2)
    if gate == "bounded":
        assert not a_log.any()
    else:
        rate = np.exp(a_log)
        assert 1 <= rate.min() < 2 and 15 < rate.max() <= 16
        assert abs(rate.mean() - 8.5) < 1  # uniform, not log-uniform


def test_chunk_length_changes_rounding_only():
    x = inputs(np.float32)
    outs = [
        call(make(Kda, KdaConfig(num_heads=2, head_dim=4, value_head_dim=6, chunk=chunk), 1e-5), x)
        for chunk in (4, 64)
    ]
    np.testing.assert_allclose(outs[0][0], outs[1][0], rtol=0, atol=2e-6)


def test_balancing_state_is_no_parameter():
    parts, _, balance = lively(small("mla", 2))
    assert issubclass(Balance, nnx.Variable) and not issubclass(Balance, nnx.Param)
    assert [leaf.shape[-1] for leaf in jax.tree.leaves(balance)] == [8]
    assert not any(info.name.endswith("router.bias") for info in jax.tree.leaves(parts.infos))
