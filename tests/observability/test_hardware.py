"""Peak rates by device name, peak memory, and the profiler's windows."""

import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import ConfigError, ProfileConfig
from moejax.observability import StepProfiler, peak, peak_flops, peak_memory_bytes


@pytest.mark.parametrize(
    ("kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("TPU7x", 1153.5),
    ],
)
def test_known_devices(kind, tflops):
    device = types.SimpleNamespace(device_kind=kind, platform="any")
    bare = getattr(peak_flops, "__wrapped__", peak_flops)
    assert bare(device) == (tflops * 1e12, "data sheet")
    factor = 0.5 if kind.startswith("NVIDIA") else 1.0
    assert bare(device, jnp.float32)[0] == tflops * 1e12 * factor


def test_cpu_is_measured_once_and_shared_by_the_simulated_devices():
    flops, how = peak_flops(jax.devices()[0], jnp.float32)
    assert how == "measured"
    assert peak_flops(jax.devices()[0], jnp.float32) == (flops, how)
    # A host does between 1 GFLOP/s and 100 TFLOP/s.
    assert 1e9 < flops * jax.local_device_count() < 1e14


def test_a_device_not_in_the_table_is_measured(monkeypatch):
    monkeypatch.setattr(peak, "_BF16_PEAKS", {"cpu": 5e12})
    assert peak_flops(jax.devices()[0]) == (5e12, "data sheet")
    monkeypatch.setattr(peak, "_BF16_PEAKS", {})
    assert peak_flops(jax.devices()[0])[1] == "measured"


def test_peak_memory_counts_what_was_held():
    before = peak_memory_bytes()
    held = np.ones(200 << 20, np.uint8)
    assert held[-1] == 1 and peak_memory_bytes() >= before > 1 << 20
    assert peak_memory_bytes() > 200 << 20


def _loop(profiler, steps):
    product = jax.jit(lambda x: x @ x)
    x = jnp.ones((8, 8))
    for step in steps:
        profiler.before(step)
        profiler.after(step, product(x))
    profiler.close()


def test_traces_the_window_and_names_the_folder(tmp_path):
    said = []
    _loop(StepProfiler(ProfileConfig(steps="2-3"), tmp_path, said.append), range(1, 6))
    traces = list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 0
    assert len(said) == 1 and str(tmp_path / "profile") in said[0]


def test_window_cut_by_the_end_of_the_run_is_still_written(tmp_path):
    said = []
    _loop(StepProfiler(ProfileConfig(steps="2-9"), tmp_path, said.append), range(1, 4))
    assert list((tmp_path / "profile").rglob("*.xplane.pb")) and len(said) == 1


def test_without_effect_nothing_is_written(tmp_path):
    said = []
    _loop(StepProfiler(ProfileConfig(), tmp_path, said.append), range(1, 4))
    assert said == []
    _loop(StepProfiler(ProfileConfig(steps="20-21"), tmp_path, said.append), range(1, 4))
    assert said == ["profile.steps=20-21 had no effect: the run did not reach it."]
    assert list(tmp_path.iterdir()) == []


def test_several_windows_and_the_steps_from_a_signal_on(tmp_path, monkeypatch):
    began, said = [], []
    monkeypatch.setattr(jax.profiler, "start_trace", began.append)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    cfg = ProfileConfig(steps="2,9-10", steps_at_signal=3)
    profiler = StepProfiler(cfg, tmp_path, said.append)
    traced = []
    for step in range(1, 12):
        if step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert profiler.starts(step) == (step in (2, 4, 9))
        profiler.before(step)
        traced += [step] if len(began) > len(said) else []
        profiler.after(step)
    assert traced == [2, 4, 5, 6, 9, 10]
    assert len(began) == len(said) == 3
    profiler.close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    assert len(said) == 3


@pytest.mark.parametrize("steps", ["a", "0-2", "5-3", "1-2,", "4-6,6-8", "8,2"])
def test_steps_that_are_none_are_refused(steps):
    with pytest.raises(ConfigError, match="profile.steps='"):
        ProfileConfig(steps=steps)


def test_unwritable_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="cannot be written"):
        StepProfiler(ProfileConfig(steps="1"), tmp_path / "file").before(1)
