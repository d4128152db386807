"""What an operation on gathered keys costs beside one of dense attention, on TPUs not here.

    python -m moejax.planner.gather_cost --chip=v5p

Prints the factor of `pallas_kernels/sparse_flash_attention/break_even.py`, from schedules that the
TPU's compiler has fixed: XLA states the cycles of each fusion of the form that gathers, and of a
Pallas kernel the compiler can write down the instructions, one a cycle. Both leave out waiting for
memory that a schedule does not foresee; nothing here has run. Ends with 2 where the compiler is not
installed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.config import ConfigError
from moejax.planner.aot import absent_devices
from moejax.planner.hardware import parse_hardware
from moejax.planner.hlo import Body, called_by, parse_computations, trips
from moejax.planner.kernel_gate import CORES, SHAPES
from pallas_kernels.choose import lowering_for
from pallas_kernels.mla_attention import mla_attention
from pallas_kernels.mla_attention.tiles import tpu_tile_for
from pallas_kernels.sparse_flash_attention import sparse_flash_attention

_CHIPS = ("v5p", "v6e")  # a tpu7x's gather does not compile within minutes
# Kimi K3.1: heads, channels of latent, rotated part, expanded key and value, chosen keys.
N, C, R, H, h, J = 96, 512, 64, 192, 128, 2048
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_LEAST = 60  # instructions of a region that counts as work
_REGION = re.compile(r"(Start|End) region (\d+)")


class Cost(NamedTuple):
    """Cycles of a pair of a query and a key, of one head, forward and backward together."""

    gathered: float
    dense: float

    @property
    def slowdown(self) -> float:
        """Cost of an operation of the gathering form beside one of the dense form."""
        return self.gathered / self.dense * (H + h) / (2 * C + R)


def fusion_cycles(hlo: str) -> int:
    """Cycles of a TPU's program outside of kernels; those of a loop count at every trip.

    Raises:
      ValueError: the length of a loop depends on data.
    """
    computations, entry = parse_computations(hlo)

    def total(body: Body) -> int:
        cycles = 0
        for found in body.values():
            said = _CYCLES.search(found.attributes)
            if said:
                cycles += int(said.group(1))
            elif found.opcode in ("while", "call", "conditional"):
                count = trips(computations, body, found) if found.opcode == "while" else 1
                if count is None:
                    raise ValueError(f"loop {found.name} has no fixed length")
                cycles += count * sum(total(computations[name]) for name in called_by(found))
        return cycles

    return total(computations[entry])


def tile_cycles(bundles: str) -> int:
    """Instructions of the largest region of a kernel's schedule: its work on one tile.

    Args:
      bundles: a dump of the compiler, an instruction a line behind its hexadecimal address.
    """
    begins: dict[str, int] = {}
    regions: list[tuple[int, int]] = []
    at = 0
    for line in bundles.splitlines():
        address = re.match(r"\s*0x([0-9a-f]+)\s", line)
        at = int(address.group(1), 16) if address else at
        for word, name in _REGION.findall(line):
            if word == "Start":
                begins[name] = at
            elif name in begins:
                regions.append((begins.pop(name), at + 1))
    large = [(begin, end) for begin, end in regions if end - begin >= _LEAST]
    return max(
        end - begin
        for begin, end in large
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e in large)
    )


def cost_on(chip: str, dump: pathlib.Path) -> Cost:
    """Compiles both forms, with gradients, for a chip.

    Args:
      chip: a TPU's name.
      dump: an empty folder that libtpu writes schedules to, as its flags have said.
    Raises:
      ConfigError: there is no such chip, or its compiler is not installed.
    """
    if chip not in _CHIPS:
        raise ConfigError(f"--chip={chip} is unknown. Chips: {', '.join(_CHIPS)}.")
    device = absent_devices(parse_hardware(f"{chip}:{SHAPES[chip]}"))[0]
    where = jax.sharding.SingleDeviceSharding(device)

    def compiled(form: Callable[..., Any], *arrays: tuple[tuple[int, ...], Any]) -> str:
        args = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in arrays]
        floats = tuple(i for i, x in enumerate(args) if x.dtype == jnp.bfloat16)
        loss = jax.grad(lambda *x: jnp.sum(form(*x)[0]), argnums=floats)
        with lowering_for("tpu", chip):
            return jax.jit(loss).trace(*args).lower().compile().as_text()

    def gathered(*x: Any) -> Any:
        return sparse_flash_attention(*x, scale=0.1, impl="chunked")

    def dense(q: Any, k: Any, v: Any, indices: Any) -> Any:
        return mla_attention(q, k, v, scale=0.1, indices=indices, impl="pallas_tpu")

    low, few, S = jnp.bfloat16, 256, 32_768
    hlo = compiled(
        gathered, ((1, few, N, C), low), ((1, few, N, R), low), ((1, S, C), low), ((1, S, R), low),
        ((1, few, J), jnp.int32),
    )  # fmt: skip
    T, heads = 4096, 8  # the tiles are those of any length and number of heads
    compiled(
        dense, ((1, T, heads, H), low), ((1, T, heads, H), low), ((1, T, heads, h), low),
        ((1, T, J), jnp.int32),
    )  # fmt: skip
    kernels = [p for p in dump.glob("*mla_attention*final_bundles.txt") if "schedule" not in p.name]
    if len(kernels) != 3:
        raise ConfigError(
            f"the compiler wrote down {len(kernels)} kernels of 3; try another libtpu."
        )
    tile = tpu_tile_for(T, T, chip)
    # XLA's cycles count all cores of a device at once
    area = tile.queries * tile.keys * CORES[chip]
    return Cost(
        fusion_cycles(hlo) / (few * J * N),
        sum(tile_cycles(path.read_text()) for path in kernels) / area,
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--chip", default="v5p", help=f"one of {', '.join(_CHIPS)}")
    chip = parser.parse_args(argv).chip
    with tempfile.TemporaryDirectory(prefix="gather-cost-") as folder:
        # libtpu reads its flags once, when it describes the first chip
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        try:
            cost = cost_on(chip, pathlib.Path(folder))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    print(
        f"{chip}: {cost.gathered:.4f} cycles a chosen key and head, {cost.dense:.4f} a visible "
        f"one: an operation of the gather costs {cost.slowdown:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
