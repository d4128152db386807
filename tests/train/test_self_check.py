"""The check before the first step: sound exchanges pass; of a broken one it names the expert."""

from __future__ import annotations

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cli.main import main
from moejax.config import MoeConfig
from moejax.config.load import load_config
from moejax.layers.moe import latent_moe
from moejax.partitioning import make_mesh
from moejax.train.self_check import (
    TOLERANCE,
    SelfCheckError,
    check_exchange,
    given_experts,
    self_check,
)
from tests.cli.conftest import flags

EXCHANGE = latent_moe.exchange_experts


def settings(expert: int, exchange: str, **changes):
    fields = {"mesh.fsdp": -1, "mesh.expert": expert, "model.moe.exchange": exchange}
    return load_config("tiny", fields | {k.replace("__", "."): v for k, v in changes.items()})


def checked(cfg):
    return check_exchange(cfg, make_mesh(cfg.mesh))


QUICK = [
    (1, "padded", 1, "float32"), (2, "ragged", 1, "bfloat16"), (4, "ragged", 2, "float32"),
    (8, "padded", 1, "float32"),
]  # fmt: skip
REST = [
    case
    for case in itertools.product((1, 2, 4, 8), ("padded", "ragged"), (1, 2), TOLERANCE)
    if case not in QUICK
]


@pytest.mark.parametrize(
    ("expert", "exchange", "slices", "dtype"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in REST)],
)
def test_sound_exchanges_pass(expert, exchange, slices, dtype):
    changes = {"model__moe__exchange_slices": slices, "train__compute_dtype": dtype}
    found = checked(settings(expert, exchange, **changes))
    assert found.passed and found.exchange == exchange
    assert found.differences.shape == (5, 16)
    assert found.differences.max() < (1e-6 if dtype == "float32" else 0.5 * TOLERANCE[dtype])


def test_experts_that_a_run_keeps_packed_are_no_obstacle():
    found = checked(settings(4, "ragged", model__moe__expert_format="mxfp4"))
    assert found.passed and found.exchange == "ragged"


@pytest.mark.parametrize(("experts", "top_k", "ranks"), [(16, 4, 8), (7, 3, 1), (896, 16, 128)])
def test_every_expert_has_rows_and_one_device_has_too_many(experts, top_k, ranks):
    ids_BTA = given_experts(ranks, MoeConfig(num_experts=experts, top_k=top_k), ranks)
    assert ids_BTA.shape[0] == ranks and ids_BTA.shape[2] == top_k
    assert (np.diff(np.sort(ids_BTA, -1), axis=-1) > 0).all()  # no expert twice in a token
    load_E = np.bincount(ids_BTA.ravel(), minlength=experts)
    assert len(load_E) == experts and load_E.min() >= 3
    sent_B = (ids_BTA >= experts - experts // ranks).sum((1, 2))  # to the last device
    if ranks > 1:
        assert sent_B.min() > 1.5 * ids_BTA[0].size / ranks


def break_exchange(monkeypatch, change):
    """Every exchange but `local` changes the experts' weights: (weights, place on the axis)."""

    def exchange_experts(*args, exchange, **options):
        *arrays, expert_fn = args

        def changed(weights, rows_RL, sizes_e):
            return expert_fn(change(weights, jax.lax.axis_index("expert")), rows_RL, sizes_e)

        broken = expert_fn if exchange == "local" else changed
        return EXCHANGE(*arrays, broken, exchange=exchange, **options)

    monkeypatch.setattr(latent_moe, "exchange_experts", exchange_experts)


def swap_two(weights, place):
    """The two experts of the device at place 2 of the expert axis answer for each other."""
    return jax.tree.map(lambda w: jnp.where(place == 2, w[::-1], w), weights)


def drop_last(weights, place):
    """The last expert of the last device gives nothing."""
    return jax.tree.map(lambda w: w.at[-1].multiply(jnp.where(place == 7, 0, 1)), weights)


def scale_gradient(weights, place):
    """Values are right; the gradient of expert 1 on the device at place 3 is 1.5 % too large."""

    def change(w):
        off = jnp.where(place == 3, 0.015, 0) * w[1]
        return w.at[1].add(off - jax.lax.stop_gradient(off))

    return jax.tree.map(change, weights)


def poison(weights, place):
    """One number of the first expert at place 5 is not a number."""
    return jax.tree.map(lambda w: w.at[0, 0, 0].add(jnp.where(place == 5, jnp.nan, 0)), weights)


@pytest.mark.parametrize(
    ("exchange", "change", "experts", "place"),
    [
        ("ragged", swap_two, {4, 5}, 2),
        ("padded", scale_gradient, {7}, 3),
        pytest.param("ragged", drop_last, {15}, 7, marks=pytest.mark.slow),
        pytest.param("padded", poison, {10}, 5, marks=pytest.mark.slow),
    ],
)
def test_a_fault_names_its_expert(monkeypatch, exchange, change, experts, place):
    break_exchange(monkeypatch, change)
    cfg = settings(8, exchange)
    found = checked(cfg)
    own = found.differences[:2].max(0) > found.tolerance  # the experts' own weights
    assert set(np.flatnonzero(own)) == experts
    assert any(f"expert {e} on device {place} differs by" in found.worst for e in experts)


def test_a_fault_stops_the_run_before_anything_is_written(monkeypatch, tmp_path, capfd):
    break_exchange(monkeypatch, drop_last)
    argv = flags(model__num_layers=2, mesh__expert=8, model__moe__num_experts=8)
    assert main(["train", "--config=tiny", f"--workdir={tmp_path / 'run'}", *argv]) == 2
    shown = capfd.readouterr().err
    assert shown.count("\n") == 1 and not (tmp_path / "run").exists()
    assert shown.startswith(
        "error: self-check: the expert exchange 'padded' of this mesh does not compute what "
        "'local' computes: expert 7 on device 7 differs by 1 in the "
    )


def test_it_runs_where_experts_lie_on_several_devices(monkeypatch):
    """auto: with an expert axis; on: always; off, or a model without experts: never."""
    good = checked(settings(1, "auto", mesh__fsdp=1, **{"mesh.data": 8}))
    assert good.passed
    said: list[str] = []
    module = importlib.import_module("moejax.train.self_check")
    monkeypatch.setattr(module, "check_exchange", lambda cfg, mesh: good)
    for cfg, lines in (
        (settings(1, "auto"), 0),
        (settings(2, "auto"), 1),
        (settings(1, "auto", train__self_check="on"), 1),
        (settings(2, "auto", train__self_check="off"), 0),
        (settings(2, "auto", **{"model.ffn.num_dense_layers": 9}), 0),
    ):
        said.clear()
        self_check(cfg, make_mesh(cfg.mesh), said.append)
        assert len(said) == lines, cfg.train.self_check
    bad = good._replace(differences=np.where(np.arange(16) == 3, np.inf, good.differences))
    monkeypatch.setattr(module, "check_exchange", lambda cfg, mesh: bad)
    with pytest.raises(SelfCheckError, match=r"expert 3 on .* differs by inf .* 1 of 16 experts"):
        cfg = settings(2, "auto")
        self_check(cfg, make_mesh(cfg.mesh), said.append)
