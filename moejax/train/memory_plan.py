"""The memory of a run's layers: what their results weigh, and what `train.remat=auto` chooses.

A step is compiled once as it is where nothing is kept. What that leaves of the budget is for the
results; which of them, the Swap Core says (`moejax.memory.swap_core`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from moejax.config import MESH_AXES, ConfigError, RunConfig
from moejax.layers.quantised import dequantised
from moejax.memory.graph import Graph, read_graph
from moejax.memory.host_link import host_link
from moejax.memory.names import check_names
from moejax.memory.policy import policy_of
from moejax.memory.swap_core import Budget, Layer, Plan, choose, plan_for
from moejax.models.block import Residual, num_sources
from moejax.models.decoder import Decoder
from moejax.partitioning import num_batch_shards
from moejax.train.state import Program, build_program
from moejax.train.trainable import merge, split
from pallas_kernels.choose import preferring

# What a device receives from others: one 400 Gb/s adapter each. The same for every mesh, so that a
# run and `moejax compile` choose alike.
PEER_BYTES_S = 50e9
_SOME_FLOPS = 1e15  # FLOP/s where no hardware is named: an accelerator of these years


def trace_layers(program: Program) -> list[Layer]:
    """One of each kind of layer of a program, as graphs of one device's share of a microbatch.

    Operators are traced in their chunked form, whose structure every platform's kernels share.
    """
    shape = dict(program.mesh.shape)
    mesh: Any = getattr(program.mesh, "abstract_mesh", program.mesh)
    adapters = program.parts.options["adapters"]
    known: dict[Any, tuple[Graph, Graph]] = {}
    found = []
    for s, segment in enumerate(program.parts.segments):
        for r, run in enumerate(segment.runs):
            specs = adapters[s][r] if adapters else ()
            same = run.kind, tuple(dataclasses.replace(one, ranks=()) for one in specs)
            if same not in known:
                layer = functools.partial(_layer, program, s, r)
                with jax.sharding.use_abstract_mesh(mesh), preferring("chunked"):
                    known[same] = _graphs(program, layer, num_batch_shards(shape))
            kind = f"{run.kind.attention} + {run.kind.ffn}"
            found.append(Layer(kind, segment.repeats * run.count, *known[same], run.count))
    return found


def keeping_nothing(cfg: RunConfig) -> RunConfig:
    """The config whose steps keep nothing: what `auto` starts from.

    Raises:
      ConfigError: names were given, which `auto` is to choose.
    """
    for field in ("keep", "offload"):
        if getattr(cfg.swap, field):
            raise ConfigError(
                f"swap.{field}={getattr(cfg.swap, field)!r} does not go with train.remat=auto, "
                "which chooses the names. Leave it out, or use train.remat=full with it."
            )
    return cfg.replace(train=cfg.train.replace(remat="full"))


def following(cfg: RunConfig, plan: Plan) -> RunConfig:
    """The config that does what a plan says, in plain fields."""
    names = {"keep": plan.names("keep"), "offload": plan.names("offload")}
    train = cfg.train.replace(remat="full")
    return cfg.replace(train=train, swap=cfg.swap.replace(**names))


def budget_of(cfg: RunConfig, kind: str, *, available: float, taken: float, flops: float) -> Budget:
    """What a device has for results.

    Args:
      cfg: its `swap` section may set memory and rates.
      kind: of the device, as jax names it.
      available: bytes of the device.
      taken: bytes that a step takes which keeps nothing.
      flops: FLOP/s of the device.
    Raises:
      ConfigError: not even a step that keeps nothing fits.
    """
    link, swap = host_link(kind), cfg.swap
    whole = swap.budget_gib * 2**30 or available
    if taken > whole:
        raise ConfigError(
            f"a step that keeps nothing takes {taken / 2**30:.2f} GiB of a device, and "
            f"{'swap.budget_gib' if swap.budget_gib else 'its memory'} is {whole / 2**30:.2f}. "
            "Use more devices, shorter rows, or a larger budget."
        )
    host = (swap.host_gib * 2**30 or link.host_bytes / 2) / link.devices
    rate = swap.link_gb_s * 1e9 or link.bytes_s
    return Budget(whole - taken, host, flops, rate, PEER_BYTES_S)


def plan_memory(program: Program, budget: Budget) -> Plan:
    """The plan of a program: the best one where its config says auto, else what its policy does."""
    layers = trace_layers(program)
    if program.cfg.train.remat == "auto":
        return choose(layers, budget)
    policy = policy_of(program.cfg)
    names = list(dict.fromkeys(name for one in layers for name in one.backward.names()))
    check_names("swap.keep", program.cfg.swap.keep, names, "this model")
    check_names("swap.offload", program.cfg.swap.offload, names, "this model")
    return plan_for(layers, budget, {name: policy.of(name) for name in names})


def recomputed_share(program: Program) -> float:
    """Share of the layers' forward FLOPs that a step computes again; 1 before `auto` chooses."""
    cfg = program.cfg
    if cfg.train.remat == "auto":
        return 1.0
    policy = policy_of(cfg)
    if policy.everything or not (policy.keep or policy.offload):
        return 0.0 if policy.everything else 1.0
    budget = Budget(0.0, 0.0, _SOME_FLOPS, PEER_BYTES_S, PEER_BYTES_S)  # decides nothing here
    plan = plan_memory(program, budget)
    return plan.flops / plan.flops_full if plan.flops_full else 1.0


def plan_of_shapes(cfg: RunConfig, sizes: dict[str, int]) -> tuple[Plan, int]:
    """What a config's policy does to the results of a mesh without devices; tokens of a device.

    With `auto` it is chosen by `swap.budget_gib`, as if the results alone took it.

    Raises:
      ConfigError: `auto` without a budget, or a name that no result of the model is called.
    """
    if cfg.train.remat == "auto" and not cfg.swap.budget_gib:
        raise ConfigError(
            "train.remat=auto chooses by the memory there is: give swap.budget_gib, or use "
            "`moejax compile --hardware=...`, which knows it."
        )
    program = program_of_shapes(cfg, sizes)
    budget = budget_of(cfg, "", available=0.0, taken=0.0, flops=_SOME_FLOPS)
    return plan_memory(program, budget), tokens_a_device(program)


def program_of_shapes(cfg: RunConfig, sizes: dict[str, int]) -> Program:
    """The program of a mesh without devices, one row for each batch shard and microbatch."""
    shape = tuple(sizes[axis] for axis in MESH_AXES)
    kinds = (AxisType.Auto,) * len(shape)
    mesh = AbstractMesh(shape, MESH_AXES, axis_types=kinds)
    rows = num_batch_shards(sizes) * cfg.train.accumulation
    cfg = cfg.replace(data=cfg.data.replace(batch_size=rows), eval=cfg.eval.replace(batch_size=0))
    return build_program(cfg, mesh)  # type: ignore[arg-type]


def tokens_a_device(program: Program) -> int:
    """Tokens of a device in one microbatch."""
    cfg = program.cfg
    rows = cfg.data.batch_size // cfg.train.accumulation
    return rows * cfg.data.seq_len // num_batch_shards(dict(program.mesh.shape))


def _graphs(program: Program, layer: Any, devices: int) -> tuple[Graph, Graph]:
    """A layer's forward pass, and its gradient with the forward pass once more in it."""
    trained, frozen = split(program.abstract.params, program.trains)
    state = _state(program)
    ids = jax.ShapeDtypeStruct(state.sources_XBTD.shape[1:3], jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    rest = (frozen, program.abstract.balance, ids, state.last, key)

    def run(trained, sources, *rest):
        return layer(trained, sources, *rest)

    def gradient(cotangents, trained, sources, *rest):
        again = jax.checkpoint(lambda *args: run(*args, *rest), prevent_cse=False)
        return jax.vjp(again, trained, sources)[1](cotangents)

    given = (trained, state.sources_XBTD, *rest)
    out = jax.eval_shape(run, *given)
    forward = read_graph(jax.make_jaxpr(run)(*given), devices=devices)
    backward = jax.make_jaxpr(gradient)(out, *given)
    return forward, read_graph(backward, range(len(jax.tree.leaves(out))), devices)


def _state(program: Program) -> Residual:
    cfg = program.cfg
    rows = cfg.data.batch_size // cfg.train.accumulation
    places = num_sources(cfg.model.num_layers, cfg.model.attn_res_block)
    shape = (places, rows, cfg.data.seq_len, cfg.model.dim)
    sources: Any = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.train.compute_dtype))
    last: Any = jax.ShapeDtypeStruct((), jnp.int32)
    return Residual(sources, last)


def _layer(program: Program, s: int, r: int, trained, sources, frozen, balance, ids, last, key):
    """The first layer of a run: its state, and the auxiliary values that may have gradients."""
    model: Decoder = program.parts.bind(merge(trained, frozen), balance)
    graphs, states = getattr(model, f"stack{s}")._split()
    first = jax.tree.map(lambda a: a[0, 0], states[r])
    module = dequantised(nnx.merge(graphs[r], first), sources.dtype)
    residual, aux = module(Residual(sources, last), ids, jnp.int32(1), key)
    return residual.sources_XBTD, [
        a for a in jax.tree.leaves(aux) if jnp.issubdtype(a.dtype, jnp.inexact)
    ]
