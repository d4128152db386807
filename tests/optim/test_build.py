"""The whole optimizer on one device: groups, decay, AdamW, clipping, average, state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.config import ConfigError, OptimConfig
from moejax.optim import assign_groups, build_optimizer, ema_params, global_norm, make_schedule
from moejax.partitioning.param_info import ParamInfo

FLAT = dict(schedule="constant", warmup_fraction=0.0)


def small():
    rng = np.random.default_rng(0)
    shapes = {"layer": {"w": (2, 6, 4), "norm": (2, 4)}, "embed": (10, 4)}
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s), jnp.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )
    infos = {
        "layer": {
            "w": ParamInfo("layer.w", ("embed", None), 1, (-2, -1)),
            "norm": ParamInfo("layer.norm", (None,), 1),
        },
        "embed": ParamInfo("embed", ("vocab", "embed")),
    }
    return params, infos


def like(params, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), jnp.float32), params)


def train(tx, params, num_updates, first_seed=1):
    state = tx.init(params)
    update = jax.jit(tx.update)
    for seed in range(first_seed, first_seed + num_updates):
        updates, state = update(like(params, seed), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_zero_gradient_only_decays():
    cfg = OptimConfig(lr=0.03, weight_decay=0.2, **FLAT)
    params, infos = small()
    tx = build_optimizer(cfg, 10, infos)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    w = params["layer"]["w"]
    np.testing.assert_allclose(updates["layer"]["w"], -0.03 * 0.2 * w, rtol=1e-6)
    np.testing.assert_allclose(updates["embed"], -cfg.adam_lr * 0.2 * params["embed"], rtol=1e-6)
    assert not np.asarray(updates["layer"]["norm"]).any()


def test_adamw_equals_optax():
    cfg = OptimConfig(name="adamw", adam_lr=0.01, weight_decay=0.1, clip_norm=0.5)
    params, infos = small()
    got, _ = train(build_optimizer(cfg, 20, infos), params, 4)
    schedule = make_schedule(cfg, 20)
    decay = {"layer": {"w": True, "norm": False}, "embed": True}
    reference = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(lambda s: 0.01 * schedule(s), 0.9, 0.95, 1e-8, weight_decay=0.1, mask=decay),
    )
    want, _ = train(reference, params, 4)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_rates_follow_group_and_schedule():
    cfg = OptimConfig(lr=0.02, adam_lr=0.004, weight_decay=0.0, clip_norm=0.0, warmup_fraction=0.5)
    params, infos = small()
    tx = build_optimizer(cfg, 8, infos)
    first, _ = tx.update(like(params, 1), tx.init(params), params)
    # Adam's first direction is the sign of the gradient; the warm-up of 4 steps starts at 1/4.
    np.testing.assert_allclose(jnp.abs(first["embed"]), 0.004 / 4, rtol=1e-4)
    rms = float(jnp.sqrt(jnp.mean(first["layer"]["w"] ** 2)))
    assert 0.7 * 0.2 * 0.02 / 4 < rms < 1.2 * 0.2 * 0.02 / 4


def test_who_gets_what(toy):
    groups = assign_groups(OptimConfig(), toy.infos())
    kda = groups["kda"]
    assert {k for k, g in kda.items() if g.kind == "muon"} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "router",
        "down",
        "up",
        "gate_up",
        "expert_down",
    }
    assert {k for k, g in kda.items() if not g.weight_decay} == {"q_conv", "a_log", "norm"}
    assert groups["embed"].kind == "adamw" and groups["embed"].weight_decay == 0.1
    assert groups["final_norm"].weight_decay == 0.0
    adamw = assign_groups(OptimConfig(name="adamw"), toy.infos())
    assert {g.kind for g in jax.tree.leaves(adamw)} == {"adamw"}
    assert {g.lr for g in jax.tree.leaves(adamw)} == {OptimConfig().adam_lr}


def test_overrides_first_match_wins():
    cfg = OptimConfig(
        lr=0.02,
        adam_lr=0.01,
        groups=((r"layer\.w$", 0.5, -1), ("layer", 2.0, 0.3), ("embed", 0, 0)),
    )
    groups = assign_groups(cfg, small()[1])
    assert groups["layer"]["w"].lr == 0.01 and groups["layer"]["w"].weight_decay == 0.1
    assert groups["layer"]["norm"].lr == 0.02 and groups["layer"]["norm"].weight_decay == 0.3
    assert groups["embed"].lr == 0.0


def test_overrides_change_the_update():
    params, infos = small()
    base = build_optimizer(OptimConfig(**FLAT), 5, infos)
    halved = build_optimizer(OptimConfig(groups=(("layer.w", 0.5, -1),), **FLAT), 5, infos)
    grads = like(params, 3)
    a, _ = base.update(grads, base.init(params), params)
    b, _ = halved.update(grads, halved.init(params), params)
    np.testing.assert_allclose(0.5 * a["layer"]["w"], b["layer"]["w"], rtol=1e-6)
    np.testing.assert_array_equal(a["embed"], b["embed"])


@pytest.mark.parametrize(
    "entry", [("(", 1.0, 0.1), ("w", 1.0), ("w", -1.0, 0.1), ("w", 1.0, -2), 3]
)
def test_bad_override_is_named(entry):
    with pytest.raises(ConfigError, match="optim.groups has"):
        OptimConfig(groups=(entry,))


def test_override_without_effect_warns():
    with pytest.warns(UserWarning, match="'nothing' matches no parameter"):
        assign_groups(OptimConfig(groups=(("nothing", 1.0, -1),)), small()[1])


def test_clip_bounds_the_norm_and_leaves_small_gradients_alone():
    params, infos = small()
    grads = like(params, 1)
    norm = float(global_norm(grads))
    flat = np.concatenate([np.ravel(g) for g in jax.tree.leaves(grads)]).astype(np.float64)
    assert norm == pytest.approx(np.linalg.norm(flat), rel=1e-6)

    def clipped(max_norm):
        from moejax.optim.adamw import clip_by_global_norm

        tx = clip_by_global_norm(max_norm)
        return tx.update(grads, tx.init(params))[0]

    assert float(global_norm(clipped(0.5))) == pytest.approx(0.5, rel=1e-6)
    for a, b in zip(jax.tree.leaves(clipped(norm * 1.01)), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(a, b)


def test_norm_of_bfloat16_is_summed_in_float32():
    tree = {"a": jnp.ones((70_000,), jnp.bfloat16)}
    assert float(global_norm(tree)) == pytest.approx(70_000**0.5, rel=1e-6)


def test_average_follows_its_recurrence():
    cfg = OptimConfig(ema_decay=0.6)
    params, infos = small()
    tx = build_optimizer(cfg, 10, infos)
    state, update = tx.init(params), jax.jit(tx.update)
    average = jax.tree.map(np.asarray, params)
    for a, b in zip(jax.tree.leaves(ema_params(state)), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a is not b
    for t in range(1, 9):
        updates, state = update(like(params, t), state, params)
        params = optax.apply_updates(params, updates)
        keep = min(0.6, (1 + t) / (10 + t))
        average = jax.tree.map(
            lambda a, w, k=keep: k * a + (1 - k) * np.asarray(w), average, params
        )
    for a, b in zip(jax.tree.leaves(ema_params(state)), jax.tree.leaves(average), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    plain = build_optimizer(OptimConfig(), 10, infos)
    with pytest.raises(ValueError, match="ema_decay"):
        ema_params(plain.init(params))


def test_state_can_be_donated_and_holds_only_arrays(toy):
    tx = build_optimizer(OptimConfig(ema_decay=0.9), 10, toy.infos())
    params = toy.random(0)
    state = jax.jit(tx.init)(params)
    shapes = {leaf.shape for leaf in jax.tree.leaves(params)}
    for leaf in jax.tree.leaves(state):
        assert isinstance(leaf, jax.Array)
        assert leaf.shape == () or (leaf.shape in shapes and leaf.dtype == jnp.float32)
