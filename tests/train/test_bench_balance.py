"""The skewed start is what it says, and the table and picture tell what the runs recorded."""

import jax
import numpy as np
import pytest
from matplotlib.image import imread

from moejax.checkpoint.layout import named_leaves
from moejax.config.load import load_config
from moejax.observability import LoadLog, MetricsLog
from moejax.partitioning import make_mesh
from moejax.train import bench_balance as bench
from moejax.train.state import build_program, init_state
from tests.cli.conftest import SMALL


def test_routers_prefer_experts_as_zipf_says():
    settings = SMALL | {"model.num_layers": 2, "model.moe.num_experts": 8, "mesh.fsdp": 1}
    cfg = load_config("tiny", {name: str(value) for name, value in settings.items()})
    program = build_program(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    state = init_state(program, 0)
    skewed = bench.zipf_start(state, 0.02, 0.3)
    before, after = (named_leaves(jax.device_get(s.params)) for s in (state, skewed))
    changed = {name for name in before if np.any(before[name] != after[name])}
    routers = {name for name in before if name.endswith("router/weight")}
    assert changed == routers | {"embed/table"} and routers
    shift = after["embed/table"] - before["embed/table"]
    np.testing.assert_allclose(np.abs(shift), 0.02, atol=1e-6)
    np.testing.assert_allclose(np.ptp(shift, axis=0), 0, atol=1e-6)  # one direction for all
    # An input of length sqrt(D) that has half its square along the direction.
    x_D = np.sign(shift[0]) * np.sqrt(0.5)
    for name in routers:
        offsets = x_D @ (after[name] - before[name]).reshape(-1, *before[name].shape[-2:])
        want = -0.3 * np.log(np.arange(1, 9))
        np.testing.assert_allclose(
            -np.sort(-offsets, -1), np.tile(want - want.mean(), (len(offsets), 1)), atol=1e-5
        )
    jax.tree.map(np.testing.assert_array_equal, skewed.balance, state.balance)


@pytest.fixture
def workdirs(tmp_path):
    """`even` evens out by step 11, `skewed` never does."""
    for name in ("even", "skewed"):
        loads = LoadLog(tmp_path / name, (1, 2), 4, every=1)
        metrics = MetricsLog(tmp_path / name)
        for step in range(1, 24):
            busy = 100 if name == "even" and step > 10 else 300
            loads.add(step, [[busy, 100, 100, 100], [100, 100, 100, 120]])
            metrics.write(step, {"loss": 5.0 - step / 100})
        loads.close()
        metrics.close()
    return {name: tmp_path / name for name in ("even", "skewed")}


def test_table_and_picture(workdirs, tmp_path):
    text = bench.table(workdirs)
    even, skewed = text.split("skewed\n")
    assert "     1  1.571  2.000  4.9900" in even and "    23  1.071  1.143  4.7700" in even
    assert "below 1.1 first at step 11, in 13 of 23 steps" in even
    assert "steps 11-20 together: 1.071 1.143" in even and "21-30" not in even
    assert "never below 1.1" in skewed
    assert imread(bench.draw(workdirs, tmp_path / "x.png")).shape[:2] == (484, 1430)


@pytest.mark.slow
def test_quantile_balancing_evens_a_skewed_start(tmp_path, capsys):
    """Tokens of ten steps together within 10 % of even after 50 steps; without it they are not."""
    assert bench.main([f"--out={tmp_path}", "--balance", "quantile", "none"]) == 0
    runs = {name: bench.read_loads(tmp_path / name) for name in ("quantile", "none")}
    assert bench.peaks(runs["quantile"])[0].mean() > 1.5
    assert bench.by_tens(runs["quantile"])[-1].mean() < bench.GOAL
    assert bench.by_tens(runs["none"])[-1].mean() > 1.5
    losses = bench.series(bench.read_metrics(tmp_path / "quantile"), "loss")[1]
    assert np.all(np.diff(losses.reshape(5, -1).mean(1)) < 0)
    assert "balance.png" in capsys.readouterr().out
