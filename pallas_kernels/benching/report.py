"""The table that the device bench ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.benching.ceilings import Ceilings
from pallas_kernels.benching.device_case import DeviceCase

_HEADS = (
    "what", "by", "ms", "x of ours", "TFLOP/s", "GB/s", "of floor", "temp MB", "compile s", "",
)  # fmt: skip
Line = Mapping[str, Any]


def table(
    facts: Line, ceilings: Ceilings, checks: Sequence[Line], times: Sequence[Line],
    cases: Sequence[DeviceCase],
) -> str:  # fmt: skip
    """Markdown: what ran where, then errors and times of each case."""
    lines = ["", ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("kind", "dry_run"))]
    if facts["dry_run"]:
        lines.append("A dry run: toy sizes, kernels interpreted on a CPU; the times mean nothing.")
    lines += [
        f"Ceilings of this device: copy {ceilings.bytes_s / 1e12:.2f} TB/s, "
        f"bfloat16 product {ceilings.flops_s / 1e12:.0f} TFLOP/s."
    ]
    for case in cases:
        mine = [line for line in times if (line["op"], line["size"]) == (case.op, case.size)]
        lines += ["", f"### {case.name}", *_notes(case, checks), "", *_rows(mine, facts["dry_run"])]
    return "\n".join(lines)


def _notes(case: DeviceCase, checks: Sequence[Line]) -> list[str]:
    notes = []
    for line in checks:
        if (line["op"], line["size"]) == (case.op, case.size):
            error = f"{line['worst']:.1e} of {line['tolerance']:.0e}" if "worst" in line else ""
            text = f"largest error against float32 {error}" if error else line.get("reason", "")
            notes.append(f"{line['impl']}: {line['status']}, {text}".rstrip(", "))
    if case.target:
        notes.append(f"Target: {case.target}.")
    return ["", *notes] if notes else []


def _rows(times: Sequence[Line], dry_run: bool) -> list[str]:
    own = [line for line in times if "ms" in line and line["impl"].startswith("pallas_")]
    ours = {line["what"]: line["ms"] for line in own}
    rows = [_row(line, ours.get(line["what"]), dry_run) for line in times]
    bar = "|---|---|" + "--:|" * (len(_HEADS) - 3) + "---|"
    return [f"| {' | '.join(_HEADS)} |", bar, *(f"| {' | '.join(row)} |" for row in rows)]


def _row(line: Line, ours: float | None, dry_run: bool) -> list[str]:
    if "ms" not in line:
        why = ": ".join(line[k] for k in ("status", "reason") if line.get(k))
        return [line["what"], line["impl"], *[""] * 7, why.replace("|", " ")]
    rates = [""] * 4
    if not dry_run:
        rates = [
            f"{line['ms'] / ours:.2f}" if ours else "", f"{line['tflops']:.0f}",
            f"{line['gb_s']:.0f}", f"{100 * line['share_of_floor']:.0f} %",
        ]  # fmt: skip
    cost = ["", ""]
    if "temporaries" in line:
        cost = [f"{line['temporaries'] / 1e6:.1f}", f"{line['compile_s']:.1f}"]
    return [line["what"], line["impl"], f"{line['ms']:.3f}", *rates, *cost, "ok"]
