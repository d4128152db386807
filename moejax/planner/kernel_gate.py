"""Every kernel compiled at its real sizes for chips that are not here: what it takes of them.

    python -m moejax.planner.kernel_gate --chips=h200,v5p [--also=b200,v6e] [--ops=kda] [--quick]

For a GPU, the compiler's PTX is assembled again, which tells registers and spilled bytes, and its
machine code is read for large matrix instructions (HGMMA). A TPU's compiler refuses a kernel whose
tiles do not fit. Ends with 1 where a kernel of `--chips` does not compile, spills, or lacks the
large matrix instructions it is meant to have; with 2 where the compilers are not installed. Several
chips take a process each: where a compiler dies of a program, twice, that is the program's fault.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from rich.console import Console

import pallas_kernels
from moejax.config import ConfigError
from moejax.planner.aot import EXTRA, absent_devices
from moejax.planner.gate_children import START, child_of, rows_of
from moejax.planner.gate_table import Row, markdown, table
from moejax.planner.hardware import Hardware, parse_hardware
from moejax.planner.kernel_resources import TOOLS, Resources, gpu_kernels, tool, tpu_kernels
from pallas_kernels.choose import lowering_for
from pallas_kernels.gate_case import GateCase
from pallas_kernels.lowering import absent_device

_FOLDER = pathlib.Path(pallas_kernels.__file__).parent
OPS = tuple(sorted(path.parent.name for path in _FOLDER.glob("*/specs.py")))
# One device of each: a GPU host of one, the smallest slice of a TPU.
SHAPES = {"v5p": "2x2x1", "v6e": "2x2", "tpu7x": "2x2x1"}
_SM = {"h100": "sm_90a", "h200": "sm_90a", "b200": "sm_100a"}
# Multiprocessors of a GPU, cores of a TPU's device.
CORES = {"h100": 132, "h200": 132, "b200": 148, "v5p": 2, "v6e": 1, "tpu7x": 1}
_GATED = (*_SM, *SHAPES)


def gate(
    chip: str, ops: Sequence[str], quick: bool = False, start: int | None = None
) -> Iterator[Row]:
    """Compiles the cases of the ops for one chip; a row for each kernel, and for each refusal.

    Args:
      chip: its name.
      ops: folders of pallas_kernels.
      quick: only the cases marked so.
      start: the case to begin with; with it, each is said before it is compiled.
    Raises:
      ConfigError: there is no such chip, or what compiles for it is not installed.
    """
    if chip not in _GATED:
        raise ConfigError(f"chip {chip!r} has no gate. Chips: {', '.join(_GATED)}.")
    hardware = parse_hardware(f"{chip}:{SHAPES.get(chip, '1x1')}")
    platform = {"cuda": "gpu"}.get(hardware.chip.platform, hardware.chip.platform)
    try:
        device = absent_devices(hardware)[0]
    except ConfigError as error:
        asked = str(error).replace(f"--hardware={hardware.name}", f"chip {chip}")
        raise ConfigError(asked) from error
    if platform == "gpu" and not all(map(tool, TOOLS)):
        missing = ", ".join(name for name in TOOLS if not tool(name))
        raise ConfigError(f"{missing} of the CUDA toolkit: not found. {EXTRA} brings them.")
    cases = (case for op in ops for case in _cases(op, platform) if case.quick or not quick)
    for index, case in enumerate(cases):
        if index < (start or 0):
            continue
        if start is not None:
            print(json.dumps({"begins": index, "case": case.name}), flush=True)
        yield from _compiled(hardware, platform, device, case)


def _cases(op: str, platform: str) -> Sequence[GateCase]:
    specs = importlib.import_module(f"pallas_kernels.{op}.specs")
    return getattr(specs, "gate_cases", lambda platform: [])(platform)


def _compiled(hardware: Hardware, platform: str, device: Any, case: GateCase) -> Iterator[Row]:
    chip = hardware.name.partition(":")[0]
    where = jax.sharding.SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where) for a in case.args]
    with tempfile.TemporaryDirectory(prefix="kernel-gate-") as folder:
        options = {"xla_dump_to": folder} if platform == "gpu" else {}
        began = time.perf_counter()
        try:
            with lowering_for(platform, chip), _told_of(hardware):
                compiled = jax.jit(case.fn).trace(*args).lower().compile(compiler_options=options)
        except Exception as error:  # each compiler has its own
            seconds, fault = time.perf_counter() - began, " ".join(str(error).split())[:300]
            yield Row(chip, case.name, Resources(""), seconds=seconds, faults=(fault,))
            return
        seconds = time.perf_counter() - began
        hlo, dump = compiled.as_text(), pathlib.Path(folder)
        found = gpu_kernels(hlo, dump, _SM[chip]) if platform == "gpu" else tpu_kernels(hlo)
    taken = {"temporaries": compiled.memory_analysis().temp_size_in_bytes, "seconds": seconds}
    if case.xla:
        yield Row(chip, case.name, Resources("XLA"), **taken)
        return
    for one in found:
        yield Row(chip, case.name, one, faults=_faults(one, case, platform), **taken)
    for fault in _absent(found, case, platform):
        yield Row(chip, case.name, Resources(""), faults=(fault,), **taken)


def _told_of(hardware: Hardware) -> contextlib.AbstractContextManager[None]:
    """Pallas asks what a kernel is for; the device beside the arguments does not tell it."""
    cores = CORES[hardware.name.partition(":")[0]]
    return absent_device(hardware.chip.platform, hardware.chip.jax_kind, cores)


def _faults(one: Resources, case: GateCase, platform: str) -> tuple[str, ...]:
    faults = ["spills registers"] if one.spilled else []
    if platform == "gpu" and one.hgmma == 0:
        if any(one.kernel.startswith(name) for name in case.matrix_bound):
            faults.append("no large matrix instruction")
    return tuple(faults)


def _absent(found: Sequence[Resources], case: GateCase, platform: str) -> Iterator[str]:
    """Faults of kernels that should be in a program and are not."""
    if not found:
        yield "no Pallas kernel in the program"
        return
    if platform == "gpu":
        for name in case.matrix_bound:
            if not any(one.kernel.startswith(name) for one in found):
                yield f"no kernel {name} in the program"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    began = time.perf_counter()
    required, also = (_names(text) for text in (options.chips, options.also))
    try:
        rows = list(_all(options, required + also))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.json:
        Console(width=160).print(table(rows))
    if options.markdown:
        seconds = time.perf_counter() - began
        text = markdown(rows, required, also, seconds, list(sys.argv[1:] if argv is None else argv))
        pathlib.Path(options.markdown).write_text(text)
    if not rows:
        print(f"error: nothing to compile: {_nothing(options)}", file=sys.stderr)
        return 2
    failed = [row for row in rows if row.faults and row.chip in required]
    for row in failed:
        print(f"fault: {row.chip} {row.case} {row.of.kernel}: {row.fault}", file=sys.stderr)
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m moejax.planner.kernel_gate", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--chips", default="h200,v5p", help=f"that must pass, of {','.join(_GATED)}: %(default)s"
    )
    parser.add_argument("--also", default="", help="chips that are reported and never fail")
    parser.add_argument("--ops", default=",".join(OPS), help="folders of pallas_kernels: all")
    parser.add_argument("--quick", action="store_true", help="only the cases marked quick")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(START, type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--markdown", metavar="FILE", help="also write the table there")
    return parser


def _nothing(options: argparse.Namespace) -> str:
    which = "marked quick " if options.quick else ""
    return f"--ops={options.ops} has no case {which}for --chips={options.chips}."


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _all(options: argparse.Namespace, chips: Sequence[str]) -> Iterator[Row]:
    ops = _names(options.ops)
    for op in ops:
        if op not in OPS:
            raise ConfigError(f"--ops={options.ops}: no operator {op!r}. Known: {', '.join(OPS)}.")
    for chip in chips:
        if len(chips) == 1:
            found = gate(chip, ops, options.quick, options.start)
        else:  # each in a process of its own, whose compiler may die
            found = rows_of(child_of(chip, options.ops, options.quick), chip)
        for row in found:
            if options.json:
                print(json.dumps(dataclasses.asdict(row)), flush=True)
            elif sys.stderr.isatty():
                print(f"{chip} {row.case} {row.of.kernel}", file=sys.stderr)
            yield row


if __name__ == "__main__":
    sys.exit(main())
