"""Bench: the peak that the Swap Core predicts against the one that XLA's compilers report.

    python -m moejax.planner.bench_swap                      # the reduced cases
    python -m moejax.planner.bench_swap --cases=v32-512xh200,linear-64xh200

Each case is compiled three times for devices that are not here: with `train.remat=none`, with
`full`, and with what `train.remat=auto` chooses under a budget that lies between the two peaks. A
line of JSON a case, then a table. Needs the extra `aot`; minutes, and for `k31-lora` half an hour.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from moejax.config import ConfigError
from moejax.config.load import load_config
from moejax.planner.aot import CompileReport, compile_for
from moejax.planner.hardware import parse_hardware

GIB = 2**30
AIM = 0.1  # of the compiled peak: how far the predicted one may be from it


class Case(NamedTuple):
    """A model, a machine and a budget.

    Attributes:
      config: name of a config.
      hardware: as `moejax compile --hardware` takes it.
      share: where the budget lies between the peaks of `full` (0) and `none` (1).
      changes: fields of the config.
    """

    config: str
    hardware: str
    share: float
    changes: dict[str, str]


def _reduced(layers: int, experts: int, **mesh: int) -> dict[str, str]:
    sizes = {"model.num_layers": layers, "model.moe.num_experts": experts}
    sizes |= {f"mesh.{axis}": size for axis, size in mesh.items()}
    return {name: str(value) for name, value in sizes.items()}


CASES = {
    "linear-8xh200": Case("kimi_linear_48b", "h200:1x8", 0.5, _reduced(9, 32, fsdp=1, expert=8)),
    "linear-8xv5p": Case("kimi_linear_48b", "v5p:2x2x2", 0.5, _reduced(9, 32, fsdp=1, expert=8)),
    "v32-8xh200": Case("deepseek_v32", "h200:1x8", 0.3, _reduced(7, 32, fsdp=1, expert=8)),
    "k31-lora-8xh200": Case("kimi_k31_lora", "h200:1x8", 0.6, _reduced(13, 64, fsdp=1, expert=8)),
    "linear-64xh200": Case("kimi_linear_48b", "h200:8x8", 0.5, {}),
    "v32-512xh200": Case("deepseek_v32", "h200:64x8", 0.5, {}),
    "k31-lora-128xh200": Case("kimi_k31_lora", "h200:16x8", 0.5, {}),
}
_REDUCED = tuple(name for name, case in CASES.items() if "model.num_layers" in case.changes)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a case came to; bytes of a device.

    Attributes:
      none, full: compiled peaks with everything and with nothing kept.
      budget: what the choice was given.
      predicted, compiled: peaks of the choice.
      host: what the compiled step holds of the host's memory.
      kept, offloaded: names.
      saved: share of the recomputed FLOPs that the choice saves.
      seconds: of the three compilations.
    """

    case: str
    none: int
    full: int
    budget: int
    predicted: int
    compiled: int
    host: int
    kept: tuple[str, ...]
    offloaded: tuple[str, ...]
    saved: float
    seconds: float

    @property
    def error(self) -> float:
        """How far the prediction is off, over the compiled peak."""
        return self.predicted / self.compiled - 1

    @property
    def holds(self) -> bool:
        """The prediction is near, the choice is within the budget, and keeping all is not."""
        return abs(self.error) <= AIM and self.compiled <= self.budget < self.none


def measure(name: str, *, budget_gib: float = 0.0) -> Found:
    """Compiles a case three times.

    Args:
      name: of a case.
      budget_gib: a budget in place of the case's.
    Raises:
      ConfigError: the compiler is not installed, or keeping nothing takes as much as all.
    """
    case, start = CASES[name], time.monotonic()

    def compiled(**fields: str) -> CompileReport:
        changes = {key.replace("__", "."): value for key, value in fields.items()}
        return compile_for(
            load_config(case.config, case.changes | changes), parse_hardware(case.hardware)
        )

    none = compiled(train__remat="none").memory.peak
    full = compiled(train__remat="full").memory.peak
    if none <= full:
        raise ConfigError(
            f"{name}: `none` takes {none} bytes and `full` {full}: nothing to choose."
        )
    budget = budget_gib or (full + case.share * (none - full)) / GIB
    report = compiled(train__remat="auto", swap__budget_gib=f"{budget:.4f}")
    plan = report.plan
    assert plan is not None  # auto always has one
    return Found(
        name, none, full, round(budget * GIB), report.predicted, report.memory.peak,
        report.memory.host, tuple(plan.names("keep")), tuple(plan.names("offload")),
        plan.saved_share, time.monotonic() - start,
    )  # fmt: skip


def table(rows: Sequence[Found]) -> str:
    """One line a case, in Markdown."""
    head = ("case", "none", "full", "budget", "predicted", "compiled", "error", "host",
            "kept, offloaded", "recompute FLOPs saved", "holds")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for row in rows:
        sizes = (row.none, row.full, row.budget, row.predicted, row.compiled)
        names = ", ".join(row.kept) + "; " + ", ".join(row.offloaded)
        lines.append((
            row.case, *(f"{size / GIB:.2f}" for size in sizes), f"{100 * row.error:+.1f} %",
            f"{row.host / GIB:.2f}", names, f"{100 * row.saved:.0f} %",
            "yes" if row.holds else "no",
        ))  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints, and ends with 1 where a case does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", default=",".join(_REDUCED), help=f"of {', '.join(CASES)}; default: %(default)s"
    )
    parser.add_argument("--budget-gib", type=float, default=0.0, help="in place of the cases'")
    options = parser.parse_args(argv)
    names = options.cases.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--cases has {', '.join(unknown)}; known: {', '.join(CASES)}.")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows: list[Found] = []
    for name in names:
        try:
            rows.append(measure(name, budget_gib=options.budget_gib))
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        facts: dict[str, Any] = dataclasses.asdict(rows[-1])
        print(json.dumps(facts | {"error": rows[-1].error}), flush=True)
    print(table(rows))
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
