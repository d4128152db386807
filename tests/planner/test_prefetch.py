"""Weights gathered and gradients scattered beside compute, in steps compiled for absent devices."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.planner.aot import CompileReport, absent_devices, compile_for
from moejax.planner.hardware import parse_hardware
from moejax.planner.overlap import hidden_share
from moejax.train.xla_flags import FLAGS, accepted, flags_for

pytestmark = pytest.mark.aot
# Layers without experts, wide enough for compute to last about as long as gathers do; the widths
# of Kimi-Linear on GPUs, less on TPUs, whose compiler takes minutes.
DENSE = {
    "model.attention": "mla", "model.last_attention": "mla", "model.moe.num_experts": 8,
    "model.num_layers": 9, "model.ffn.num_dense_layers": 9, "mesh.expert": 1, "mesh.fsdp": -1,
    "optim.name": "adamw", "optim.qk_clip": 0,
}  # fmt: skip
SMALLER = DENSE | {
    "model.num_layers": 5, "model.ffn.num_dense_layers": 5, "model.dim": 1024,
    "model.ffn.dim": 4096, "model.vocab_size": 8192, "model.mla.num_heads": 8,
    "model.mla.kv_latent": 256, "data.seq_len": 1024,
}  # fmt: skip
MODEL = {"gpu": DENSE, "tpu": SMALLER}
HARDWARE = {"gpu": "h200:2x8", "tpu": "v5p:2x2x4"}
NEEDS = {"gpu": "jax_plugins.xla_cuda13", "tpu": "libtpu"}


@functools.cache
def report(platform: str, prefetch: str) -> CompileReport:
    if importlib.util.find_spec(NEEDS[platform]) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    cfg = load_config("kimi_linear_48b", MODEL[platform] | {"train.prefetch": prefetch})
    return compile_for(cfg, parse_hardware(HARDWARE[platform]), with_overlap=True)


def in_loops(platform: str, prefetch: str, kinds: tuple[str, ...]):
    rows = [r for r in report(platform, prefetch).overlap if r.in_loop and r.kind in kinds]
    assert rows, kinds
    return rows


def test_gpu_gathers_the_next_layer_and_scatters_the_one_before():
    both = ("all-gather", "reduce-scatter")
    off, ahead = (in_loops("gpu", level, both) for level in ("off", "ahead"))
    assert hidden_share(ahead) > hidden_share(off) + 0.2
    scatters = in_loops("gpu", "ahead", ("reduce-scatter",))
    assert (
        hidden_share(scatters)
        > 0.5
        > 0.1
        > hidden_share(in_loops("gpu", "off", ("reduce-scatter",)))
    )
    assert all(row.flops > 0 for row in ahead)
    # The first layer's gather and the last one's scatter stand outside the loop now.
    assert sum(row.sent_bytes for row in ahead) < sum(row.sent_bytes for row in off)


def test_tpu_fuses_gathers_with_compute():
    off, within = (in_loops("tpu", level, ("all-gather",)) for level in ("off", "within"))
    assert sum(row.async_bytes for row in off) == 0
    assert hidden_share(within) > 0.8 and all(row.flops > 0 for row in within)
    # The same gathers, each counted once though it stands in every fusion that carries it on.
    sent = [sum(row.sent_bytes for row in rows) for rows in (off, within)]
    assert sent[0] == sent[1] > 0


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_compiler_knows_every_name(platform):
    if importlib.util.find_spec(NEEDS[platform]) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    wanted = flags_for("ahead", platform)
    cfg = load_config("kimi_linear_48b", DENSE)
    mesh = make_mesh(cfg.mesh, absent_devices(parse_hardware(HARDWARE[platform])))
    assert accepted(wanted, mesh) == wanted
    assert len(wanted) == sum(flag.platform == platform for flag in FLAGS)
