"""Every step stands once in metrics.jsonl, in strict JSON, whatever happened to the run before."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from moejax.config import ConfigError, LogConfig
from moejax.observability import DeadExperts, MetricsLog, TensorBoard, open_writers, read_metrics


def _strict(path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_values_of_every_kind_are_strict_json(tmp_path):
    log = MetricsLog(tmp_path / "new" / "dir")
    log.write(
        np.int64(1),
        {
            "loss": jnp.float32(1.5),
            "lr": jnp.bfloat16(0.25),
            "moe_load_max": jnp.array([1.0, jnp.nan, jnp.inf], jnp.bfloat16),
            "dead_experts": np.array([0, 3]),
            "grad_norm": float("inf"),
            "eval_loss": None,
            "note": "x",
            "flag": True,
        },
    )
    row = _strict(log.path)[0]  # read while the log is open: the line is flushed
    assert row == {
        "step": 1,
        "loss": 1.5,
        "lr": 0.25,
        "moe_load_max": [1.0, None, None],
        "dead_experts": [0, 3],
        "grad_norm": None,
        "eval_loss": None,
        "note": "x",
        "flag": True,
    }


def test_a_resumed_run_has_each_step_once(tmp_path):
    log = MetricsLog(tmp_path)
    for step in range(1, 8):
        log.write(step, {"loss": 1.0})
    log.close()
    with log.path.open("a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    log = MetricsLog(tmp_path, first_step=5)
    for step in range(5, 10):
        log.write(step, {"loss": 2.0})
    rows = read_metrics(tmp_path)
    assert (
        [row["step"] for row in rows]
        == list(range(1, 10))
        == [r["step"] for r in _strict(log.path)]
    )
    assert [row["loss"] for row in rows] == [1.0] * 4 + [2.0] * 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_new_run_starts_an_empty_file(tmp_path):
    MetricsLog(tmp_path).write(3, {"loss": 1.0})
    MetricsLog(tmp_path).write(1, {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


@pytest.mark.parametrize("opener", [MetricsLog, TensorBoard])
def test_unwritable_workdir_is_one_line(tmp_path, opener):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ConfigError, match="cannot be written: .*Choose another --workdir"
    ) as caught:
        opener(tmp_path / "file")
    assert "\n" not in str(caught.value)


def test_full_disk_is_one_line(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(log, "_file", Full())
    with pytest.raises(ConfigError, match="No space left on device"):
        log.write(1, {"loss": 1.0})


def _events(folder):
    """Scalars of an event file: records are length, its CRC, data, its CRC."""
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            at += 16 + length
    return found


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writers = open_writers(tmp_path, LogConfig())
    writers.write(4, {"loss": 0.5, "moe_load_max": [1.5, 2.5], "eval_loss": float("nan"), "n": "x"})
    writers.close()
    scalars = _events(tmp_path / "tensorboard")
    assert scalars == [(4, "loss", 0.5), (4, "moe_load_max/0", 1.5), (4, "moe_load_max/1", 2.5)]
    assert read_metrics(tmp_path)[0]["moe_load_max"] == [1.5, 2.5]


def test_tensorboard_is_off_when_not_wanted(tmp_path):
    open_writers(tmp_path, LogConfig(tensorboard=False)).write(1, {"loss": 1.0})
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_dead_experts_equal_a_count_over_the_window():
    rng = np.random.default_rng(0)
    layers, experts, window, steps = 3, 5, 10, 60
    loads = (rng.random((steps, layers, experts)) < 0.12).astype(np.int32) * 7
    tracker = DeadExperts(layers, experts, window)
    for i in range(steps):
        dead = tracker.update(100 + i, jnp.asarray(loads[i]))
        seen = loads[max(i + 1 - window, 0) : i + 1].sum(axis=0) > 0
        expected = (~seen).sum(axis=1) if i + 1 >= window else np.zeros(layers)
        np.testing.assert_array_equal(dead, expected)
    assert dead.shape == (layers,)


def test_dead_experts_at_the_border_of_the_window():
    tracker = DeadExperts(1, 2, window=100)
    both, first = np.array([[1, 1]]), np.array([[1, 0]])
    counts = [int(tracker.update(step, both if step == 1 else first)[0]) for step in range(1, 103)]
    assert counts == [0] * 100 + [1] * 2  # step 101 is the first whose last 100 steps lack a token
    with pytest.raises(ValueError, match=r"\(1, 3\); it must be \(1, 2\)"):
        tracker.update(103, np.ones((1, 3)))
