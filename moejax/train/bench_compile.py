"""How compiling the training step grows with layers and experts: a part of `bench_exchange`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from moejax.config.load import load_config
from moejax.partitioning import make_mesh
from moejax.train.state import Program, abstract_tree, build_program, from_tree
from moejax.train.step import batch_sharding, train_step

DEVICES = 8
# Changes to `kimi_k3` that leave its pattern.
DEEP = {
    "model.dim": "32", "model.vocab_size": "257", "model.ffn.dim": "48",
    "model.kda.num_heads": "2", "model.kda.head_dim": "8",
    "model.kda.value_head_dim": "8", "model.kda.decay_rank": "8",
    "model.kda.output_gate_rank": "8", "model.kda.chunk": "16",
    "model.mla.num_heads": "2", "model.mla.q_latent": "16", "model.mla.kv_latent": "16",
    "model.mla.nope_dim": "8", "model.mla.rope_dim": "4", "model.mla.value_dim": "8",
    "model.moe.top_k": "4", "model.moe.expert_dim": "16", "model.moe.latent_dim": "16",
    "train.compute_dtype": "float32", "data.tokenizer": "byte", "data.seq_len": "64",
    "data.batch_size": "8", "mesh.fsdp": "1", "mesh.expert": "8",
}  # fmt: skip


def jitted(program: Program, options: Mapping[str, Any] | None):
    """`train_step` as a run compiles it."""
    return jax.jit(
        lambda state, batch: train_step(program, state, batch),
        donate_argnums=0, out_shardings=(program.shardings, None),
        compiler_options=dict(options) if options else None,
    )  # fmt: skip


def deep_program(deep: Mapping[str, str], layers: int, experts: int) -> Program:
    """K3's pattern at toy width over all devices."""
    changes = {"model.num_layers": str(layers), "model.moe.num_experts": str(experts)}
    cfg = load_config("kimi_k3", {**deep, **changes})
    return build_program(cfg, make_mesh(cfg.mesh, jax.devices()[:DEVICES]))


def lower_step(program: Program):
    """The training step, lowered from shapes; nothing is allocated."""
    shape = jax.ShapeDtypeStruct(
        (1, program.cfg.data.batch_size, program.cfg.data.seq_len), np.int32,
        sharding=batch_sharding(program),
    )  # fmt: skip
    batch = dict.fromkeys(("tokens", "segment_ids", "labels"), shape)
    with jax.set_mesh(program.mesh):
        options = {"xla_backend_optimization_level": 0}
        return jitted(program, options).lower(from_tree(abstract_tree(program)), batch)


def compile_costs(
    deep: Mapping[str, str], layers: tuple[int, int], experts: tuple[int, int], times: int
) -> list[dict]:
    """Seconds (the best) and sizes of the steps, as ratios to the smallest.

    Args:
      deep: changes to `kimi_k3`.
      layers, experts: from and to, one changing at a time.
      times: how often each is compiled.
    """
    small = layers[0], experts[0]
    points = small, (layers[1], small[1]), (small[0], experts[1])
    found: dict[tuple[int, int], dict] = {}
    for point in [*dict.fromkeys(points)] * times:
        program = deep_program(deep, *point)
        start, cpu_start = time.perf_counter(), time.process_time()
        lowered = lower_step(program)
        lower_s = time.perf_counter() - start
        with jax.set_mesh(program.mesh):
            compiled = lowered.compile()
        taken = {
            "seconds": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu_start,
            "lower_s": lower_s,
        }
        old = found.get(point, taken)
        found[point] = {
            **{name: min(old[name], value) for name, value in taken.items()},
            "lowered_lines": lowered.as_text().count("\n"),
            "compiled_lines": compiled.as_text().count("\n"),
        }  # fmt: skip
        jax.clear_caches()
    return [
        {"layers": point[0], "experts": point[1]} | cost
        | {f"{name}_ratio": value / found[small][name] for name, value in cost.items()}
        for point, cost in found.items()
    ]  # fmt: skip
