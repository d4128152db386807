"""The rows of the kernel gate, on a terminal and as the page that is committed."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import re
import subprocess
from collections.abc import Sequence

from rich.table import Table

from moejax.planner.kernel_resources import Resources, tool

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "libtpu")
_HEADS = ("regs", "SMEM", "spills", "HGMMA", "HMMA", "temp MB", "s")
_TPU_HEADS = ("VMEM", "temp MB", "s")
_TPUS = ("v5p", "v6e", "tpu7x")


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of one program for one chip.

    Attributes:
      chip, case: which program.
      of: the kernel; without a name for what concerns the whole program.
      temporaries: bytes the whole program needs beside its arguments and results.
      seconds: of compiling the program.
      faults: why it fails the gate.
    """

    chip: str
    case: str
    of: Resources
    temporaries: int = 0
    seconds: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def fault(self) -> str:
        return "; ".join(self.faults)


def table(rows: Sequence[Row]) -> Table:
    """The rows as people read them."""
    shown = Table(box=None, header_style="bold")
    for name in ("chip", "case", "kernel"):
        shown.add_column(name, overflow="fold")
    for name in _HEADS:
        shown.add_column(name, justify="right")
    shown.add_column("", overflow="fold")
    for row in rows:
        shown.add_row(row.chip, row.case, row.of.kernel, *_figures(row), row.fault or "ok")
    return shown


def _figures(row: Row) -> list[str]:
    of = row.of
    numbers = (of.registers, of.onchip, of.spilled, of.hgmma, of.mma)
    return [*map(str, numbers), f"{row.temporaries / 1e6:.1f}", f"{row.seconds:.1f}"]


def markdown(
    rows: Sequence[Row], required: Sequence[str], also: Sequence[str], seconds: float,
    argv: Sequence[str],
) -> str:  # fmt: skip
    """A page with a table for each chip.

    Args:
      rows: of all chips.
      required, also: chips that must pass, and others.
      seconds: the whole gate took.
      argv: how it was called.
    """
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    lines = [
        "# Kernels compiled for chips that are not here", "",
        "Written by `./launch/test.sh aot`, which calls", "",
        f"    python -m moejax.planner.kernel_gate {' '.join(argv)}".rstrip(), "",
        f"{date}, {seconds / 60:.1f} minutes, {', '.join(versions())}.", "",
        f"Must pass: {', '.join(required)}. Reported: {', '.join(also) or 'none'}. "
        "SMEM: bytes of a block's shared memory; VMEM: those of a TPU's. Spills: bytes stored and "
        "loaded. HGMMA: large matrix instructions (UTCMMA on a b200). Temporaries and seconds "
        "are those of the whole program. Nothing here was run on such a chip.", "",
    ]  # fmt: skip
    for chip in dict.fromkeys((*required, *also)):
        lines += _section(chip, [row for row in rows if row.chip == chip], chip in required)
    return "\n".join(lines)


def _section(chip: str, rows: Sequence[Row], required: bool) -> list[str]:
    faults = sum(len(row.faults) for row in rows)
    programs = len({row.case for row in rows})
    verdict = "all pass" if not faults else f"{faults} faults"
    kind = "must pass" if required else "reported"
    heads = _TPU_HEADS if chip in _TPUS else _HEADS
    lines = [
        f"## {chip}: {programs} programs, {verdict} ({kind})", "",
        f"| case | kernel | {' | '.join(heads)} | |", "|---|---|" + "--:|" * len(heads) + "---|",
    ]  # fmt: skip
    for row in rows:
        fault = re.sub(r"[|<>]", " ", row.fault) or "ok"
        kernel = f"`{row.of.kernel}`" if row.of.kernel else ""
        figures = [*_figures(row)[1:2], *_figures(row)[-2:]] if chip in _TPUS else _figures(row)
        lines.append(f"| {row.case} | {kernel} | {' | '.join(figures)} | {fault} |")
    return [*lines, ""]


def versions() -> list[str]:
    """Of the compilers, those that are installed."""
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if tool("ptxas"):
        told = subprocess.run([tool("ptxas"), "--version"], capture_output=True, text=True)
        found += [f"ptxas {number}" for number in re.findall(r"\bV([\d.]+)", told.stdout)]
    return found
