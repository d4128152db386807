"""The skewed start is what it says, and the table and picture tell what the runs recorded."""

import jax
import numpy as np
import pytest
from matplotlib.image import imread

import moejax
from moejax.config.load import load_config
from moejax.observability import LoadLog, MetricsLog
from moejax.partitioning import make_mesh
from moejax.train import bench_balance as bench
from moejax.train.state import build_program, init_state
from tests.cli.conftest import SMALL


def test_biases_fall_with_the_rank_in_an_order_of_each_layer():
    settings = SMALL | {"model.num_layers": 4, "model.moe.num_experts": 8, "mesh.fsdp": 1}
    cfg = load_config("tiny", {name: str(value) for name, value in settings.items()})
    program = build_program(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    state = init_state(program, 0)
    skewed = bench.zipf_start(state, 0.3)
    assert skewed.params is state.params
    leaves = jax.tree.leaves(jax.device_get(skewed.balance))
    bias_LE = np.concatenate([leaf.reshape(-1, 8) for leaf in leaves])
    want = -0.3 * np.log(np.arange(1, 9))
    for bias in -np.sort(-bias_LE, -1):
        np.testing.assert_allclose(bias, want - want.mean(), atol=1e-6)
    assert len(bias_LE) == 3 and len(np.unique(bias_LE, axis=0)) == 3


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
    even, skewed = text.split("skewed, from")
    assert even.startswith("even, from a load that falls as rank^-0.47")
    assert "     1  1.571  2.000  4.9900" in even and "    23  1.071  1.143  4.7700" in even
    assert "below 1.1 first at step 11, in 13 of 23 steps" in even
    assert "steps 11-20 together: 1.071 1.143" in even and "21-30" not in even
    assert "never below 1.1" in skewed
    assert imread(bench.draw(workdirs, tmp_path / "x.png")).shape[:2] == (484, 1430)


def test_help_tells_every_option_with_its_default(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for option in ("start DIR", "out DIR", "steps N", "scale S", "balance NAME"):
        assert f" --{option} " in shown
    assert "example" in shown and shown.count("(default: ") == 5
    with pytest.raises(SystemExit):
        bench.main(["--stesp=3"])
    assert "unknown option '--stesp=3'" in capsys.readouterr().err


@pytest.mark.slow
def test_quantile_balancing_evens_a_skewed_start(tmp_path):
    """Within 10 % of even after 50 steps, the loss falling; without it the skew stays."""
    begun = moejax.train("tiny", tmp_path / "tiny", {"train.num_steps": 120, "eval.every": 0})
    assert begun.step == 120
    arguments = [f"--out={tmp_path}", f"--start={tmp_path / 'tiny'}"]
    assert bench.main([*arguments, "--balance", "quantile", "none"]) == 0
    runs = {name: bench.read_loads(tmp_path / name) for name in ("quantile", "none")}
    assert bench.peaks(runs["quantile"])[0].mean() > 2
    assert bench.peaks(runs["quantile"])[-10:].mean() < bench.GOAL
    assert bench.by_tens(runs["quantile"])[-1].max() < bench.GOAL
    assert bench.peaks(runs["none"])[-10:].mean() > 2
    losses = bench.series(bench.read_metrics(tmp_path / "quantile"), "loss")[1]
    assert losses[-10:].mean() < losses[:10].mean()
