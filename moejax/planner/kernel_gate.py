"""Every kernel compiled at its real sizes for chips that are not here: what it takes of them.

    python -m moejax.planner.kernel_gate --chips=h200,v5p,v6e [--ops=kda,permute] [--quick] [--json]

For a GPU, the compiler's PTX is assembled again, which tells registers, spilled bytes and shared
memory, and its machine code is read for large matrix instructions (HGMMA). A TPU's compiler refuses
a kernel whose tiles do not fit. Ends with 1 where a kernel that must compile does not, or spills.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from moejax.planner.aot import absent_devices
from moejax.planner.hardware import CHIPS, Hardware, parse_hardware
from pallas_kernels.choose import lowering_for
from pallas_kernels.gate_case import GateCase

OPS = ("attn_res", "gated_norm", "grouped_matmul", "kda", "linear_xent", "permute", "short_conv")
# One device of each: a GPU host of one, the smallest slice of a TPU.
_SHAPES = {"v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
_SM = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel (of a GPU) or one program (of a TPU).

    Attributes:
      chip, case, kernel: which; `kernel` is empty for a program that was refused.
      registers: of a thread.
      shared: bytes of shared memory of a block.
      spilled: bytes of spill stores and loads.
      hgmma, mma: large matrix instructions (HGMMA, UTCMMA) and small ones (HMMA) in machine code;
        -1 where no disassembler is there.
      temporaries: bytes the whole program needs beside its arguments and results.
      seconds: of compiling the program.
      fault: why it fails the gate, or "".
    """

    chip: str
    case: str
    kernel: str
    registers: int = 0
    shared: int = 0
    spilled: int = 0
    hgmma: int = 0
    mma: int = 0
    temporaries: int = 0
    seconds: float = 0.0
    fault: str = ""


def gate(chip: str, ops: tuple[str, ...], quick: bool = False) -> Iterator[Row]:
    """Compiles the cases of the ops for one chip."""
    hardware = parse_hardware(f"{chip}:{_SHAPES.get(chip, '1x1')}")
    platform = {"cuda": "gpu"}.get(hardware.chip.platform, hardware.chip.platform)
    device = absent_devices(hardware)[0]
    for op in ops:
        specs = importlib.import_module(f"pallas_kernels.{op}.specs")
        for case in getattr(specs, "gate_cases", lambda platform: [])(platform):
            if case.quick or not quick:
                yield from _compiled(hardware, platform, device, case)


def _compiled(hardware: Hardware, platform: str, device: Any, case: GateCase) -> Iterator[Row]:
    chip = hardware.name.partition(":")[0]
    where = jax.sharding.SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in case.args]
    with tempfile.TemporaryDirectory(prefix="kernel-gate-") as folder:
        options = {"xla_dump_to": folder} if platform == "gpu" else {}
        began = time.perf_counter()
        try:
            with lowering_for(platform):
                compiled = jax.jit(case.fn).trace(*args).lower().compile(compiler_options=options)
        except Exception as error:  # each compiler has its own
            fault = " ".join(str(error).split())[:300]
            yield Row(chip, case.name, "", seconds=time.perf_counter() - began, fault=fault)
            return
        seconds = time.perf_counter() - began
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        if platform != "gpu":
            yield Row(chip, case.name, case.name, temporaries=temporaries, seconds=seconds)
            return
        ours = _pallas_kernels(compiled.as_text())
        for row in _resources(pathlib.Path(folder), _SM[chip], ours):
            fault = "spills registers" if row["spilled"] else ""
            named = any(row["kernel"].startswith(name) for name in case.matrix_bound)
            if named and row["hgmma"] == 0:
                fault = "no large matrix instruction"
            yield Row(chip, case.name, **row, temporaries=temporaries, seconds=seconds, fault=fault)


def _pallas_kernels(hlo: str) -> set[str]:
    """Names of the Triton kernels that a program calls."""
    return set(re.findall(r"(\w+)\)*/pallas_call", hlo))  # transpose(jvp(name)) in a gradient


def _resources(folder: pathlib.Path, sm: str, ours: set[str]) -> list[dict[str, Any]]:
    """What every kernel that came from Triton takes, from the PTX that was dumped."""
    rows = []
    for ptx in sorted(folder.glob("*.ptx")):
        if not ours.intersection(re.findall(r"\.entry (\w+)\(", ptx.read_text())):
            continue
        cubin = ptx.with_suffix(".cubin")
        told = _run([_tool("ptxas"), f"-arch={sm}", "-v", str(ptx), "-o", str(cubin)])
        for block in re.split(r"Compiling entry function '", told)[1:]:
            kernel = block.partition("'")[0]
            if kernel in ours:
                rows.append(_row(kernel, block, cubin))
    return rows


def _row(kernel: str, told: str, cubin: pathlib.Path) -> dict[str, Any]:
    def number(pattern: str) -> int:
        found = re.search(pattern, told)
        return int(found.group(1)) if found else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    hgmma = mma = -1
    if _tool("cuobjdump"):
        code = _run([_tool("cuobjdump"), "-sass", "-fun", kernel, str(cubin)])
        hgmma = len(re.findall(r"\b(?:HGMMA|UTCHMMA|UTCQMMA)\b", code))
        mma = len(re.findall(r"\bHMMA\b", code))
    return {
        "kernel": kernel, "registers": number(r"Used (\d+) registers"),
        "shared": number(r"(\d+) bytes smem"), "spilled": spilled, "hgmma": hgmma, "mma": mma,
    }  # fmt: skip


def _tool(name: str) -> str:
    """Path of a program of the CUDA toolkit, from the path or from NVIDIA's wheels; "" if none."""
    found = shutil.which(name)
    if found:
        return found
    for folder in sys.path:
        for path in pathlib.Path(folder, "nvidia").glob(f"*/bin/{name}"):
            return str(path)
    return ""


def _run(command: list[str]) -> str:
    near = str(pathlib.Path(command[0]).parent)  # a disassembler calls another beside it
    env = os.environ | {"PATH": f"{os.environ.get('PATH', '')}:{near}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    return done.stdout + done.stderr


def table(rows: list[Row]) -> Table:
    """The rows as people read them."""
    shown = Table(box=None, header_style="bold")
    for name in ("chip", "case", "kernel"):
        shown.add_column(name, overflow="fold")
    for name in ("regs", "SMEM", "spills", "HGMMA", "HMMA", "temp MB", "s"):
        shown.add_column(name, justify="right")
    shown.add_column("", overflow="fold")
    for row in rows:
        figures = (row.registers, row.shared, row.spilled, row.hgmma, row.mma)
        shown.add_row(
            row.chip, row.case, row.kernel, *(str(n) if n >= 0 else "?" for n in figures),
            f"{row.temporaries / 1e6:.1f}", f"{row.seconds:.1f}", row.fault or "ok",
        )  # fmt: skip
    return shown


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.planner.kernel_gate", description=__doc__
    )
    parser.add_argument("--chips", default="h200,v5p", help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--ops", default=",".join(OPS), help="folders of pallas_kernels")
    parser.add_argument("--quick", action="store_true", help="only the cases marked quick")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    rows = []
    for chip in options.chips.split(","):
        for row in gate(chip, tuple(options.ops.split(",")), options.quick):
            rows.append(row)
            if options.json:
                print(json.dumps(dataclasses.asdict(row)), flush=True)
    if not options.json:
        Console(width=150).print(table(rows))
    return int(any(row.fault for row in rows))


if __name__ == "__main__":
    sys.exit(main())
