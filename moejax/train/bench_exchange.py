"""What each expert exchange costs here: `python -m moejax.train.bench_exchange`.

Three parts, each a table (`--part` chooses one):

- tiny: tokens/s of `tiny`'s whole training step on 8 simulated devices;
- layer: tokens/s of one layer of 64 experts, forward and backward, for every exchange, level and
  number of slices;
- compile: seconds and size of the training step of a model with Kimi K3's pattern at toy widths,
  from 13 to 93 layers and from 16 to 896 experts.

Speeds are ratios to `local` on one device. The cases take turns in one process and each round gives
one ratio, of which the median is shown: what else the machine does hits both sides. Simulated
devices share the cores: a ratio compares exchanges with each other and is no scaling.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.config import FfnConfig, MeshConfig, MoeConfig, RunConfig
from moejax.config.load import load_config
from moejax.data.packing import next_token_labels
from moejax.data.synthetic import synthetic_document
from moejax.layers.moe.latent_moe import LatentMoe
from moejax.layers.param import param_infos
from moejax.partitioning import BATCH_AXES, make_mesh, shardings_for
from moejax.partitioning.expert_exchange.levels import LEVELS
from moejax.train.bench_compile import DEEP, DEVICES, compile_costs, jitted
from moejax.train.state import Program, TrainState, build_program, init_state
from moejax.train.step import batch_sharding

HOSTS = 2  # which level "host" takes the devices of the expert axis for
LIMIT = 1.3  # most that compiling may grow
PARTS = ("tiny", "layer", "compile")


class Case(NamedTuple):
    """One way for tokens to reach their experts."""

    exchange: str
    level: str = "expert"
    slices: int = 1

    def moe(self) -> dict[str, Any]:
        """Fields of `model.moe`."""
        return {
            "exchange": self.exchange, "exchange_level": self.level,
            "exchange_slices": self.slices, "exchange_hosts": HOSTS * (self.level == "host"),
        }  # fmt: skip


LOCAL = Case("local")
ALL = (LOCAL, *map(Case._make, itertools.product(("padded", "ragged"), LEVELS, (1, 2))))
# A training step takes half a minute to compile: here one thing at a time changes.
SOME = (
    LOCAL, Case("padded"), Case("ragged"), Case("ragged", "expert", 2), Case("ragged", "host"),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
      tiny: changes to `tiny`.
      tiny_cases, layer_cases: `LOCAL` and what is compared with it.
      moe: of the layer.
      dim, rows, tokens: its width, rows (a multiple of the devices) and tokens of a row.
      deep: changes to `kimi_k3` for what is compiled.
      layers, experts: from and to.
      compiles: how often each is compiled; the fastest counts.
      rounds: timed turns of each case, after one that warms up.
      compiler_options: for what is timed.
    """

    tiny: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tiny_cases: tuple[Case, ...] = SOME
    layer_cases: tuple[Case, ...] = ALL
    moe: MoeConfig = MoeConfig(num_experts=64, top_k=8, expert_dim=64, latent_dim=64, num_shared=1)
    dim: int = 128
    rows: int = 16
    tokens: int = 256
    deep: Mapping[str, str] = dataclasses.field(default_factory=DEEP.copy)
    layers: tuple[int, int] = (13, 93)
    experts: tuple[int, int] = (16, 896)
    compiles: int = 1
    rounds: int = 7
    compiler_options: Mapping[str, Any] | None = None


# ---- speed


class Ready(NamedTuple):
    """A compiled case."""

    call: Callable[[], Any]  # -> a number that every case computes alike, once it is there
    compile_s: float


def speeds(ready: Mapping[Case, Ready], tokens: int, rounds: int) -> list[dict]:
    """One record a case: tokens/s, and the median over rounds of its ratio to `LOCAL`."""
    seconds: dict[Case, list[float]] = {case: [] for case in ready}
    values: dict[Case, float] = {}
    for turn in range(rounds + 1):
        for case, program in ready.items():
            start = time.perf_counter()
            value = float(program.call())
            if turn:
                seconds[case].append(time.perf_counter() - start)
            else:
                values[case] = value
    base = np.array(seconds[LOCAL])
    return [
        case._asdict() | {
            "tokens_per_s": tokens / float(np.median(seconds[case])),
            "ratio": float(np.median(base / np.array(seconds[case]))),
            "value": values[case], "compile_s": program.compile_s,
        }
        for case, program in ready.items()
    ]  # fmt: skip


def tiny_config(sizes: Sizes, case: Case) -> RunConfig:
    """`tiny` with the case's exchange: on its own mesh, or on one device."""
    changes = {f"model.moe.{name}": str(value) for name, value in case.moe().items()}
    if case == LOCAL:
        changes |= {"mesh.fsdp": "1", "mesh.expert": "1"}
    return load_config("tiny", {"data.tokenizer": "byte", **sizes.tiny, **changes})


def synthetic_batch(program: Program) -> dict[str, jax.Array]:
    """A batch of bytes of generated text, as one microbatch."""
    data = program.cfg.data
    wanted, text = data.batch_size * data.seq_len, ""
    for number in itertools.count():
        text += synthetic_document(number)
        if len(text) >= wanted:
            break
    tokens = np.frombuffer(text[:wanted].encode(), np.uint8).astype(np.int32)
    tokens = tokens.reshape(data.batch_size, data.seq_len)
    ones = np.ones_like(tokens)
    labels = np.stack([next_token_labels(*row) for row in zip(tokens, ones, strict=True)])
    batch = {"tokens": tokens, "segment_ids": ones, "labels": labels}
    return jax.device_put(jax.tree.map(lambda a: a[None], batch), batch_sharding(program))


def tiny_program(sizes: Sizes, case: Case) -> Program:
    """The case's training step on its devices."""
    cfg = tiny_config(sizes, case)
    return build_program(cfg, make_mesh(cfg.mesh, _devices(case)))


def ready_step(sizes: Sizes, begin: TrainState, case: Case) -> Ready:
    """The training step; each call is the next step from `begin` on, and its number the loss."""
    program = tiny_program(sizes, case)
    state, batch = jax.device_put(begin, program.shardings), synthetic_batch(program)
    start = time.perf_counter()
    with jax.set_mesh(program.mesh):
        compiled = jitted(program, sizes.compiler_options).lower(state, batch).compile()
    seconds = time.perf_counter() - start

    def call():
        nonlocal state
        state, metrics = compiled(state, batch)
        return jax.block_until_ready((state, metrics))[1]["loss"]

    return Ready(call, seconds)


def _devices(case: Case) -> list[jax.Device]:
    return jax.devices()[: 1 if case == LOCAL else DEVICES]


def ready_layer(sizes: Sizes, case: Case) -> Ready:
    """One MoE layer with the gradients of weights and input; its number is their squared norm."""
    cfg = sizes.moe.replace(**case.moe())
    devices = _devices(case)
    mesh = make_mesh(MeshConfig(fsdp=1, expert=len(devices)), devices)
    layer = LatentMoe(sizes.dim, cfg, FfnConfig(), 1e-5, sizes.dim**-0.5, nnx.Rngs(params=0))
    graph, state, *others = nnx.split(layer, nnx.Param, ...)
    params, rest = nnx.to_pure_dict(state), nnx.to_pure_dict(others[0])
    shape = (sizes.rows, sizes.tokens, sizes.dim)
    x_BTD, cotangent_BTD = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
    segment_ids_BT = np.ones(shape[:2], np.int32)

    def run(params, rest, x_BTD, segment_ids_BT, cotangent_BTD):
        out_BTD, pull = jax.vjp(
            lambda params, x_BTD: nnx.merge(graph, params, rest)(x_BTD, segment_ids_BT)[0],
            params, x_BTD,
        )  # fmt: skip
        grads = pull(cotangent_BTD)
        return sum((a**2).sum() for a in jax.tree.leaves(grads)), out_BTD, grads

    where, everywhere = NamedSharding(mesh, P(BATCH_AXES)), NamedSharding(mesh, P())
    layout = shardings_for(param_infos(state), params, mesh)
    arguments = (
        jax.device_put(params, layout), jax.device_put(rest, everywhere),
        *(jax.device_put(a, where) for a in (x_BTD, segment_ids_BT, cotangent_BTD)),
    )  # fmt: skip
    start = time.perf_counter()
    with jax.set_mesh(mesh):
        options = dict(sizes.compiler_options) if sizes.compiler_options else None
        compiled = jax.jit(run, compiler_options=options).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    return Ready(lambda: jax.block_until_ready(compiled(*arguments))[0], seconds)


# ---- the command


def records(sizes: Sizes, part: str, say: Callable[[str], Any]) -> Iterator[dict]:
    """What a part measures, as plain dicts."""
    if part == "compile":
        yield from compile_costs(sizes.deep, sizes.layers, sizes.experts, sizes.compiles)
        return
    if part == "tiny":
        program = tiny_program(sizes, LOCAL)
        begin, data = jax.device_get(init_state(program, 0)), program.cfg.data
        cases, tokens = sizes.tiny_cases, data.batch_size * data.seq_len
        make = functools.partial(ready_step, sizes, begin)
    else:
        cases, tokens = sizes.layer_cases, sizes.rows * sizes.tokens
        make = functools.partial(ready_layer, sizes)
    ready = {}
    for case in cases:
        ready[case] = make(case)
        say(f"{part} {' '.join(map(str, case))}: compiled in {ready[case].compile_s:.1f} s")
    yield from speeds(ready, tokens, sizes.rounds)


def shape_of(sizes: Sizes, part: str) -> str:
    """One line on what a part runs."""
    if part == "compile":
        return f"training step of Kimi K3's pattern at width {sizes.deep['model.dim']}"
    if part == "tiny":
        cfg = tiny_config(sizes, sizes.tiny_cases[-1])
        moe, mesh, data = cfg.model.moe, cfg.mesh, cfg.data
        return (
            f"step of tiny: {data.batch_size} x {data.seq_len} tokens, {cfg.model.num_layers} "
            f"layers, {moe.num_experts} experts, top {moe.top_k}, fsdp {mesh.fsdp} x expert "
            f"{mesh.expert}, {cfg.train.compute_dtype}"
        )
    moe = sizes.moe
    return (
        f"layer, forward and backward: {sizes.rows} x {sizes.tokens} tokens of width {sizes.dim}, "
        f"{moe.num_experts} experts, top {moe.top_k}, latent {moe.latent_dim}, expert width "
        f"{moe.expert_dim}, expert {DEVICES}, float32"
    )


def markdown(rows: Sequence[dict]) -> str:
    """The records as a table."""
    if "layers" in rows[0]:
        lines = [
            "| layers | experts | lower + compile | CPU | lowering | lines of HLO | optimised |",
            "|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in rows:
            cells = [
                f"{row[name]:{form}}{unit} ({row[f'{name}_ratio']:.2f}x)"
                for name, form, unit in (
                    ("seconds", ".1f", " s"), ("cpu_s", ".1f", " s"), ("lower_s", ".1f", " s"),
                    ("lowered_lines", "d", ""), ("compiled_lines", "d", ""),
                )
            ]  # fmt: skip
            lines.append(f"| {row['layers']} | {row['experts']} | {' | '.join(cells)} |")
        return "\n".join(lines)
    lines = ["| exchange | level | slices | tokens/s | of `local` |", "|---|---|---:|---:|---:|"]
    lines += [
        f"| `{row['exchange']}` | `{row['level']}` | {row['slices']} | {row['tokens_per_s']:.0f} "
        f"| {row['ratio']:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None, sizes: Sizes | None = None) -> int:
    """Measures and prints the parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m moejax.train.bench_exchange",
                                     description=(__doc__ or "").partition("\n")[0])  # fmt: skip
    parser.add_argument("--part", choices=PARTS, help="only this one")
    parser.add_argument("--json", action="store_true", help="a line for every record instead")
    options = parser.parse_args(argv)
    sizes = sizes or Sizes()
    machine = {
        "device": jax.devices()[0].device_kind, "devices": DEVICES, "jax": jax.__version__,
        "cores": os.cpu_count(),
    }  # fmt: skip
    if not options.json:
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
    for part in [options.part] if options.part else PARTS:
        rows = list(records(sizes, part, lambda line: None if options.json else print(line)))
        if options.json:
            for row in rows:
                print(json.dumps({"part": part, "what": shape_of(sizes, part)} | row | machine))
        else:
            print(f"\n{shape_of(sizes, part)}\n\n{markdown(rows)}\n", flush=True)
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    raise SystemExit(main())
