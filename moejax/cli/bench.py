"""`moejax bench`: the operators beside plain ways to compute the same, on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pallas_kernels
from moejax.cli.bars import CountBar
from moejax.cli.flags import Parser, add_source, positive, start_devices
from moejax.cli.tables import Column, print_table, say
from moejax.config import ConfigError, nearest

if TYPE_CHECKING:
    from pallas_kernels.benching.comparison import Comparison, Result

EXAMPLES = (
    "moejax bench kernels --device=cpu",
    "moejax bench kernels --ops=kda,grouped_matmul --rounds=10 --json",
)
# Folders of pallas_kernels whose bench.py compares; those with floors first.
_FIRST = ("kda", "grouped_matmul", "linear_xent", "sparse_flash_attention")
_FOUND = pathlib.Path(pallas_kernels.__file__).parent.glob("*/bench.py")
OPS = tuple(dict.fromkeys((*_FIRST, *sorted(path.parent.name for path in _FOUND))))
_HEADS = (
    "op", "size", "against", "ms", "ours", "faster", "floor", "MB", "ours", "less", "floor", "",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Compares and reports. Returns 0, or 1 where a floor of memory is not held."""
    options, overrides = _parser().parse(argv)
    if overrides:
        raise ConfigError("kernels have no --config.FIELD: their sizes are those of the table.")
    if options.what != "kernels":
        raise ConfigError(f"what is to be timed? `moejax bench kernels`; got {options.what!r}.")
    ops = _ops(options.ops)
    try:
        start_devices(argparse.Namespace(platform=options.device, devices=None, multihost=False))
    except ConfigError as error:  # its advice are options of other commands
        found = str(error).partition(" Without one,")[0]
        raise ConfigError(f"{found} Use --device=cpu.") from error

    from pallas_kernels.benching.comparison import machine

    rows = _comparisons(ops)
    results = _run(rows, options.rounds)
    if options.json:
        facts = {"machine": machine(), "rounds": options.rounds}
        print(json.dumps(facts | {"rows": [_as_json(r) for r in results]}, indent=2))
    else:
        _show(machine(), results, options.rounds)
    return int(not all(r.memory_held for r in results))


def _parser() -> Parser:
    parser = Parser(
        "bench",
        what="Each operator, forward and with gradients, beside a plain way to compute the same: "
        "run in turn in one process, the best of several rounds after a warm-up, in float32; "
        "temporaries as the compiler states them. Floors of memory are promises: the exit code is "
        "1 where one is not held. Floors of time are told and judged by nobody, since a busy "
        "machine swings by a factor of two. On a GPU, `python -m pallas_kernels.bench` also knows "
        "real sizes and other libraries.",
        examples=EXAMPLES,
        config=False,
    )
    add_source(parser, "what", "kernels")
    parser.add_argument(
        "--device", choices=("cpu", "gpu", "tpu"), default="cpu", help="default: cpu"
    )
    parser.add_argument("--ops", metavar="LIST", help=f"some of {', '.join(OPS)} (default: all)")
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="N", help="of which the best counts: 3"
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


def _ops(text: str | None) -> list[str]:
    ops = text.split(",") if text is not None else list(OPS)
    for op in ops:
        if op not in OPS:
            near = nearest(op, OPS, count=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"--ops={text}: no operator {op!r}.{hint} Known: {', '.join(OPS)}.")
    return ops


def _comparisons(ops: Sequence[str]) -> list[Comparison]:
    found: list[Comparison] = []
    for op in ops:
        found += importlib.import_module(f"pallas_kernels.{op}.bench").comparisons()
    return found


def _run(rows: Sequence[Comparison], rounds: int) -> list[Result]:
    from pallas_kernels.benching.comparison import run

    results = []
    with CountBar("kernels") as bar:
        for i, row in enumerate(rows):
            bar.update(i, len(rows))
            results.append(run(row, rounds))
        bar.update(len(rows), len(rows))
    return results


def _as_json(result: Result) -> dict[str, Any]:
    ratios = {"time_ratio": result.time_ratio, "memory_ratio": result.memory_ratio}
    held = {"time_held": result.time_held, "memory_held": result.memory_held}
    return result._asdict() | ratios | held


def _show(machine: dict[str, str], results: Sequence[Result], rounds: int) -> None:
    say(", ".join(f"{name} {value}" for name, value in machine.items()))
    say(f"{results[0].dtype}; best of {rounds} rounds in turn; MB of temporaries")
    right = Column(right=True)
    columns = [Column(), Column(), Column(), *[right] * 8, Column(dim=True)]
    print_table(columns, [_row(r) for r in results], _HEADS)


def _row(r: Result) -> list[str]:
    time_floor = f">= {r.faster:g}" if r.faster is not None else ""
    memory_floor = f"<= 1/{r.smaller:g}" if r.smaller is not None else ""
    verdict = ""
    if time_floor or memory_floor:
        missed = [n for n, held in (("time", r.time_held), ("memory", r.memory_held)) if not held]
        verdict = f"not held: {' and '.join(missed)}" if missed else "held"
    what = " f+b" if "backward" in r.what else ""
    return [
        r.op + what, r.size, r.against, f"{r.old_ms:.2f}", f"{r.new_ms:.2f}",
        f"{r.time_ratio:.1f}", time_floor, f"{r.old_bytes / 1e6:.2f}", f"{r.new_bytes / 1e6:.2f}",
        f"1/{r.memory_ratio:.1f}", memory_floor, verdict,
    ]  # fmt: skip
