"""Pictures show what was logged, with whatever metrics there are."""

import numpy as np
import pytest
from matplotlib.image import imread

from moejax.config import ConfigError
from moejax.observability import MetricsLog, plots


def _log(workdir, keep, steps=130):
    log = MetricsLog(workdir)
    for step in range(1, steps + 1):
        metrics = {
            "loss": 3 + 3 / step,
            "lr": 0.01,
            "tokens_per_s": 1000.0 * (step > 1),
            "eval_loss": 3.5 if step % 10 == 0 else None,
            "moe_load_max": [1.0 + step / 100, None],
            "moe_load_min": 0.5,
        }
        log.write(step, {name: value for name, value in metrics.items() if name in keep})
    log.close()


@pytest.mark.parametrize(
    "keep",
    [
        ("loss", "lr", "tokens_per_s", "eval_loss", "moe_load_max", "moe_load_min"),
        ("loss", "moe_load_max"),
        ("loss",),
        (),
    ],
    ids=len,
)
@pytest.mark.parametrize("steps", [1, 130])
def test_run_with_any_metrics(tmp_path, keep, steps, recwarn):
    _log(tmp_path, keep, steps)
    path = plots.plot_run(tmp_path, tmp_path / "pictures" / "run.png")
    height, width, _ = imread(path).shape
    assert width == 1210 and height in (528, 770)
    assert [str(w.message) for w in recwarn] == []


def test_curves_of_two_runs(tmp_path):
    for name in ("a", "b"):
        _log(tmp_path / name, ("loss", "eval_loss"))
    runs = {"one": tmp_path / "a", "two": tmp_path / "b" / "metrics.jsonl"}
    blank = plots.plot_curves({"one": tmp_path / "a"}, tmp_path / "one.png")
    both = plots.plot_curves(runs, tmp_path / "both.png", "eval_loss")
    assert not np.array_equal(imread(blank), imread(both))


def test_smoothing_keeps_ends_and_means():
    falling = np.linspace(4, 2, 400)
    smooth = plots.smooth(falling)
    assert smooth[0] == pytest.approx(4) and np.abs(smooth - falling).max() < 0.02
    noisy = np.random.default_rng(0).normal(size=4000)
    assert plots.smooth(noisy).std() < 0.15
    assert plots.smooth(np.array([3.0])) == [3.0]


def test_nothing_to_draw_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="no metrics at"):
        plots.plot_run(tmp_path, tmp_path / "x.png")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="hold no step yet"):
        plots.plot_run(tmp_path, tmp_path / "x.png")
    _log(tmp_path, ("loss",))
    with pytest.raises(ConfigError, match="have no lr"):
        plots.plot_curves({"a": tmp_path}, tmp_path / "x.png", "lr")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        plots.plot_run(tmp_path, tmp_path / "file" / "x.png")


@pytest.mark.parametrize("steps", [2, 3, 130])
def test_steps_on_the_axis_are_whole(tmp_path, monkeypatch, steps):
    _log(tmp_path, ("loss", "lr", "tokens_per_s", "moe_load_max"), steps)
    monkeypatch.setattr(plots, "save_png", lambda figure, path: figure)
    figure = plots.plot_run(tmp_path, "none")
    for axes in (axes for axes in figure.axes if axes.get_title(loc="left")):
        ticks = axes.get_xticks()
        assert len(ticks) and np.all(ticks == np.round(ticks)), axes.get_title(loc="left")
