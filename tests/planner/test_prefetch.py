"""Weights gathered and gradients scattered beside compute, in steps compiled for absent devices."""

from __future__ import annotations

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.partitioning.shard import gather
from moejax.planner.aot import CompileReport, absent_devices, compile_for
from moejax.planner.hardware import parse_hardware
from moejax.planner.overlap import hidden_share
from moejax.train.xla_flags import FLAGS, accepted, flags_for
from pallas_kernels.choose import lowering_for

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


def test_over_a_whole_torus_weights_are_gathered_and_not_summed():
    """At once, a gather over 4 x 4 x 4 chips is an all-reduce: twice the bytes, never hidden."""
    if importlib.util.find_spec(NEEDS["tpu"]) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    sizes = {"mesh.fsdp": 4, "mesh.expert": 16}
    cfg = load_config("kimi_linear_48b", sizes)
    mesh = make_mesh(cfg.mesh, absent_devices(parse_hardware("v5p:4x4x4")))
    stored = NamedSharding(mesh, P(None, ("fsdp", "expert"), None))
    rows = NamedSharding(mesh, P(("fsdp", "expert"), None))
    w_XDF = jax.ShapeDtypeStruct((8, 2048, 1024), jnp.bfloat16, sharding=stored)
    x_MD = jax.ShapeDtypeStruct((64 * 1024, 2048), jnp.bfloat16, sharding=rows)

    def last_of(w_XDF, x_MD):
        def layer(x_MD, w_DF):
            w_DF = gather(w_DF, ("embed", None))
            return jnp.tanh(x_MD @ w_DF) @ w_DF.T, None

        return jax.lax.scan(layer, x_MD, w_XDF)[0]

    summed = {}
    for platform in ("cpu", "tpu"):  # a CPU gathers at once
        with jax.set_mesh(mesh), lowering_for(platform):
            text = jax.jit(lambda w, x: last_of(w, x)).lower(w_XDF, x_MD).compile().as_text()
        summed[platform] = bool(re.search(r" all-reduce(?:-start)?\(", text))
    assert summed == {"cpu": True, "tpu": False}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_compiler_knows_every_name(platform):
    if importlib.util.find_spec(NEEDS[platform]) is None:
        pytest.skip("needs pip install 'moejax[aot]'")
    wanted = flags_for("ahead", platform)
    cfg = load_config("kimi_linear_48b", DENSE)
    mesh = make_mesh(cfg.mesh, absent_devices(parse_hardware(HARDWARE[platform])))
    assert accepted(wanted, mesh) == wanted
    assert len(wanted) == sum(flag.platform == platform for flag in FLAGS)
