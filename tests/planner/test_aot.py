"""Compiled for GPUs and TPUs that are not here: it works, and agrees with what is known of them."""

from __future__ import annotations

import importlib.util

import pytest

from moejax.config.load import load_config
from moejax.planner.aot import compile_for
from moejax.planner.hardware import parse_hardware
from tests.cli.conftest import SMALL

pytestmark = pytest.mark.aot
# Rows and latents of 128: for smaller products in float32 XLA's GPU compiler of jax 0.10.2 finds no
# tiles ("Couldn't find output tile sizes"), for a B200 more often than for an H200.
WITH_EXPERTS = SMALL | {
    "model.ffn.num_dense_layers": 0, "model.moe.num_experts": 8, "mesh.expert": 2,
    "data.seq_len": 128, "model.mla.q_latent": 128, "model.mla.kv_latent": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "module", "devices"),
    [
        ("h200:2x2", "jax_plugins.xla_cuda13", 4), ("b200:1x2", "jax_plugins.xla_cuda13", 2),
        ("v5p:2x2x1", "libtpu", 4), ("tpu7x:2x2x1", "libtpu", 8),
    ],
)  # fmt: skip
def test_the_step_compiles_for_absent_devices(hardware, module, devices):
    if importlib.util.find_spec(module) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    cfg = load_config("tiny", WITH_EXPERTS)
    report = compile_for(cfg, parse_hardware(hardware))
    here = compile_for(cfg, parse_hardware(f"cpu:{devices}"))
    assert report.devices == devices and report.fits
    # The same arrays lie on a device everywhere; a TPU pads the small ones to its tiles.
    ratio = report.memory.arguments / here.memory.arguments
    assert 1 <= ratio < 6 if module == "libtpu" else ratio == pytest.approx(1, abs=0.01)
    assert report.flops_per_token == here.flops_per_token
    kinds = {row.kind.removeprefix("ragged-") for row in report.collectives if row.axes == "expert"}
    assert "all-to-all" in kinds
    assert report.roofline.mfu > 0


def test_a_step_too_large_for_the_chip_does_not_fit():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    wide = {"model.dim": 8192, "model.ffn.dim": 65536, "model.vocab_size": 300000}
    report = compile_for(load_config("tiny", SMALL | wide), parse_hardware("v6e:2x2"))
    assert not report.fits and report.memory.peak > report.memory.available


@pytest.mark.parametrize(
    ("hardware", "module", "axis"),
    [("v5p:2x2x1*2", "libtpu", "data"), ("h200:2x2", "jax_plugins.xla_cuda13", "data"),
     ("v5p:2x2x1*2", "libtpu", "expert"), ("h200:2x2", "jax_plugins.xla_cuda13", "expert")],
)  # fmt: skip
def test_what_crosses_hosts_or_slices_is_what_mesh_dcn_says(hardware, module, axis):
    """HSDP: over the replicas a step sums shards and nothing else, with `data` between hosts."""
    if importlib.util.find_spec(module) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    sizes = {"mesh.data": 2, "mesh.fsdp": -1, "mesh.expert": 2, f"mesh.dcn.{axis}": 2}
    report = compile_for(load_config("tiny", WITH_EXPERTS | sizes), parse_hardware(hardware))
    crossing = [row for row in report.collectives if row.network_bytes]
    assert crossing and all(axis in row.axes for row in crossing)
    kinds = {row.kind for row in crossing}
    assert kinds == {"all-reduce"} if axis == "data" else "ragged-all-to-all" in kinds
    place = "host" if module != "libtpu" else "slice"
    assert f"{axis}=2 (" in report.links and f"between 2 {place}s)" in report.links
