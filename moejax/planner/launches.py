"""Kernels that one layer launches, and the bytes between them, with small operators and fused ones.

    python -m moejax.planner.launches --config=kimi_linear_48b --hardware=h200:1x1 --tokens=8192

Compiles one layer forward and backward for a device that need not be here, once for each choice of
`kernels.impl`, and reads the optimised program: what it launches (a loop's body as often as it
runs) and what goes to memory and back between the launches.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console
from rich.table import Table

from moejax.config import ConfigError, ModelConfig
from moejax.config.load import load_config
from moejax.layers.param import Balance
from moejax.models.block import DecoderLayer, num_sources, start_residual
from moejax.models.decoder import layer_kinds
from moejax.planner.aot import absent_devices
from moejax.planner.cost import FREE, cost
from moejax.planner.hardware import parse_hardware
from moejax.planner.hlo import Body, called_by, parse_computations, trips
from moejax.train.compile import kernel_lines
from pallas_kernels.choose import lowering_for, preferring, recording


@dataclasses.dataclass(frozen=True)
class Launches:
    """What a program launches.

    Attributes:
      kernels: launches.
      bytes: read and written by them all, each operand and result once a launch.
      ours: of the launches, those of Pallas kernels.
      open_loops: loops whose length only the data tells, counted as if they ran once.
    """

    kernels: int
    bytes: float
    ours: int
    open_loops: int

    def __add__(self, other: Launches) -> Launches:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        kernels, moved, ours, loops = (a + b for a, b in pairs)
        return Launches(kernels, moved, ours, loops)

    def times(self, count: int) -> Launches:
        return Launches(
            self.kernels * count, self.bytes * count, self.ours * count, self.open_loops
        )


_NOTHING = Launches(0, 0.0, 0, 0)
_CONTROL = ("while", "conditional", "call")


def count_launches(hlo: str) -> Launches:
    """Launches of an optimised program, from its text."""
    computations, entry = parse_computations(hlo)
    return _of_computation(entry, computations)


def _of_computation(name: str, computations: dict[str, Body]) -> Launches:
    body = computations.get(name, {})
    total = _NOTHING
    for found in body.values():
        if found.opcode in FREE or found.opcode.endswith(("-done", "-update")):
            continue
        if found.opcode not in _CONTROL:
            ours = found.opcode == "custom-call" and "triton" in found.attributes
            total += Launches(1, cost(found, body, computations).bytes, int(ours), 0)
            continue
        inner = [_of_computation(one, computations) for one in called_by(found)]
        if found.opcode == "conditional":
            total += max(inner, key=lambda one: one.kernels, default=_NOTHING)
            continue
        count = trips(computations, body, found) if found.opcode == "while" else 1
        whole = sum(inner, _NOTHING)
        total += whole.times(1 if count is None else count)
        total += Launches(0, 0.0, 0, int(count is None))
    return total


def layer_program(cfg: ModelConfig, number: int, tokens: int) -> tuple[Any, list[Any]]:
    """``f(params, state, x, ...)``, the gradient of a layer's mean output, and its arguments."""
    kind = layer_kinds(cfg)[number]
    abstract = nnx.eval_shape(lambda: DecoderLayer(cfg, kind, nnx.Rngs(params=0)))
    graph, *states = nnx.split(abstract, nnx.Param, Balance, ...)
    params, balance, rest = states
    low = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16), params)

    def loss(params, x_BTD, balance, rest, segment_ids_BT):
        layer = nnx.merge(graph, params, balance, rest)
        residual = start_residual(x_BTD, num_sources(cfg.num_layers, cfg.attn_res_block))
        out, _ = layer(residual, segment_ids_BT, jnp.int32(number), None)
        return jnp.mean(out.running_sum().astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, tokens, cfg.dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    return jax.grad(loss, argnums=(0, 1)), [low, x, balance, rest, ids]


def compiled_launches(
    cfg: ModelConfig, number: int, tokens: int, hardware: str, impl: str
) -> tuple[Launches, list[str]]:
    """Launches of layer `number`, forward and backward, and what ran its operators."""
    target = parse_hardware(hardware)
    platform = {"cuda": "gpu"}.get(target.chip.platform, target.chip.platform)
    where = jax.sharding.SingleDeviceSharding(absent_devices(target)[0])
    fn, shapes = layer_program(cfg, number, tokens)
    args = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)
    with lowering_for(platform), preferring(impl), recording() as kernels:
        lowered = jax.jit(fn).trace(*args).lower()
    return count_launches(lowered.compile().as_text()), kernel_lines(kernels)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m moejax.planner.launches", description=__doc__)
    parser.add_argument("--config", default="kimi_linear_48b")
    parser.add_argument("--hardware", default="h200:1x1", help="one device, as h200:1x1")
    parser.add_argument("--layer", type=int, default=1, help="number of the layer, from 0")
    parser.add_argument("--tokens", type=int, default=8192, help="of the one row")
    parser.add_argument("--impls", default="chunked,auto", help="values of kernels.impl to compare")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    try:
        cfg = load_config(options.config).model
        found = {
            impl: compiled_launches(cfg, options.layer, options.tokens, options.hardware, impl)
            for impl in options.impls.split(",")
        }
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        for impl, (launches, lines) in found.items():
            row = {"impl": impl, **dataclasses.asdict(launches), "operators": lines}
            print(json.dumps(row), flush=True)
        return 0
    _show(options, found)
    return 0


def _show(options: argparse.Namespace, found: dict[str, tuple[Launches, list[str]]]) -> None:
    console = Console(width=120)
    console.print(
        f"layer {options.layer} of {options.config}, forward and backward, {options.tokens} tokens "
        f"on {options.hardware}"
    )
    table = Table(box=None, header_style="bold")
    for name in (
        "kernels.impl",
        "launches",
        "of Pallas",
        "GB moved",
        "fewer",
        "less",
        "open loops",
    ):
        table.add_column(name, justify="left" if name == "kernels.impl" else "right")
    first = next(iter(found.values()))[0]
    for impl, (launches, _) in found.items():
        table.add_row(
            impl, f"{launches.kernels:,}", f"{launches.ours:,}", f"{launches.bytes / 1e9:.2f}",
            f"{first.kernels / launches.kernels:.2f}x", f"{first.bytes / launches.bytes:.2f}x",
            str(launches.open_loops),
        )  # fmt: skip
    console.print(table)
    for impl, (_, lines) in found.items():
        for line in lines:
            console.print(f"{impl}: {line}", markup=False)


if __name__ == "__main__":
    sys.exit(main())
