"""Times tiles of an operator's kernels on the present device, and writes the better ones down.

    python -m pallas_kernels.tune --op=grouped_matmul [--cases=K3] [--budget-s=240]

From the reasoned tiles one number at a time is halved, doubled or, where small, changed by one;
what is faster and gives the same results is kept, until nothing is. Tiles that do not compile are
passed over. On a CPU, or with --dry-run, at toy sizes in Pallas' interpreter: that shows that it
works, and only a table that is named is written.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels import tuning
from pallas_kernels.bench import OPS, compiler_options, draw
from pallas_kernels.benching.device_case import DeviceCase, both_directions, relative_errors
from pallas_kernels.benching.timing import Budget, device_seconds, once
from pallas_kernels.choose import target_platform
from pallas_kernels.tuning import Question

_GAIN = 1.03  # of clocks that swing by less
_FARTHEST = 4  # times a reasoned number; far beyond it a compiler may take minutes to refuse
_SMALL = 8


class Trial(NamedTuple):
    """What one choice of tiles gave: milliseconds, or a reason against it."""

    ms: float = float("inf")
    reason: str = ""


class Tuner(NamedTuple):
    """A case that is tuned.

    Attributes:
      case, sets: what runs.
      impl: our implementation.
      expected: results with the reasoned tiles.
      seconds: the clock.
      budget: time that is left.
      say: prints a line.
    """

    case: DeviceCase
    sets: list[Any]
    impl: str
    expected: list[Any]
    seconds: Callable[..., float]
    budget: Budget
    say: Callable[[str], None]

    def trial(self, tiles: dict[Question, Any]) -> Trial:
        """Forward and backward with these tiles."""
        began = time.perf_counter()
        jax.clear_caches()  # or a kernel that was traced before would keep its tiles
        try:
            with tuning.forcing(tiles):
                program = compiled(self.case, self.impl, self.sets[0])
            errors = relative_errors(jax.tree.leaves(program(*self.sets[0])), self.expected)
            worst = max(float(e) for e in errors)
            if not worst <= self.case.tolerance:
                return Trial(reason=f"wrong by {worst:.1e}")
            return Trial(self.seconds(program, self.sets) * 1e3)
        except Exception as error:  # what a compiler has against tiles is told, not raised
            return Trial(reason=" ".join(str(error).split())[:100])
        finally:
            self.budget.took(time.perf_counter() - began)


def tune(tuner: Tuner, question: Question, reasoned: Any) -> tuple[Any, float, float]:
    """The best tiles found for one question; milliseconds with the reasoned and with these."""
    tuner.say(f"{tuner.case.name}: {question.function}({question.sizes})")
    start = first = tuner.trial({question: reasoned})
    tuner.say(f"  {_shown(reasoned)}: {start.ms:.4f} ms, reasoned")
    best, tried, better = reasoned, {reasoned}, True
    while better:
        better = False
        for tiles in neighbours(best, reasoned):
            if tiles in tried or not tuner.budget.allows():
                continue
            tried.add(tiles)
            found = tuner.trial({question: tiles})
            tuner.say(f"  {_shown(tiles)}: {found.reason or f'{found.ms:.4f} ms'}")
            if found.ms * _GAIN < first.ms:
                best, first, better = tiles, found, True
                break
    return best, start.ms, first.ms


def neighbours(tiles: Any, reasoned: Any) -> Iterator[Any]:
    """Tiles of which one number differs."""
    limits = tuning.fields(reasoned)
    for name, value in tuning.fields(tiles).items():
        steps = {value // 2, value * 2} | ({value - 1, value + 1} if value < _SMALL else set())
        for other in sorted(steps - {value}):
            low, high = limits[name] / _FARTHEST, limits[name] * _FARTHEST
            if value > 0 and other > 0 and low <= other <= high:
                yield tuning.rebuilt(tiles, tuning.fields(tiles) | {name: other})


def compiled(case: DeviceCase, impl: str, inputs: Any) -> Any:
    """Outputs and gradients of a case as one program."""
    run = both_directions(case.implementation(impl), case.argnums)
    return jax.jit(run).lower(*inputs).compile(compiler_options=compiler_options())


def _shown(tiles: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in tuning.fields(tiles).items())


def _tuners(options: argparse.Namespace, toy: bool) -> Iterator[tuple[Tuner, dict[Question, Any]]]:
    """A tuner for each case, with the questions its kernels ask."""
    impl = "pallas_gpu" if target_platform() == "cpu" else f"pallas_{target_platform()}"
    budget, clock = Budget(options.budget_s), once if toy else device_seconds
    module = importlib.import_module(f"pallas_kernels.{options.op}.bench")
    for case in module.device_cases(toy) if hasattr(module, "device_cases") else []:
        if options.cases not in case.name or not case.argnums:
            continue
        sets = [draw(case, seed) for seed in range(1 if toy else 3)]
        with tuning.asking() as asked:
            program = compiled(case, impl, sets[0])
        expected = jax.tree.leaves(program(*sets[0]))
        say = lambda line: print(line, flush=True)  # noqa: E731
        yield Tuner(case, sets, impl, expected, clock, budget, say), asked


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.op not in OPS:
        parser.error(f"--op={options.op} has no tiles to time. Known: {', '.join(OPS)}.")
    toy = options.dry_run or jax.default_backend() == "cpu"
    table = pathlib.Path(__file__).parent / options.op / "tuned.json" if not toy else None
    if options.table:
        table = pathlib.Path(options.table)
    device, written = jax.devices()[0].device_kind, 0
    seen: set[Question] = set()
    for tuner, asked in _tuners(options, toy):
        for question, reasoned in asked.items():
            if question in seen:
                continue
            seen.add(question)
            best, was_ms, ms = tune(tuner, question, reasoned)
            if best != reasoned and table is not None:
                tuning.write(table, device, question, best, _facts(tuner.case, was_ms, ms))
                written += 1
    if not seen:
        parser.error(f"--cases={options.cases}: no such case of {options.op} that has tiles.")
    print(f"{len(seen)} choices timed on {device}, {written} written to {table or 'nothing'}")
    return 0


def _facts(case: DeviceCase, was_ms: float, ms: float) -> dict[str, Any]:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "case": case.name,
        "ms": ms,
        "reasoned_ms": was_ms,
        "date": date,
        "jax": jax.__version__,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tune", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--op", required=True, help=f"one of {', '.join(OPS)}")
    parser.add_argument("--cases", default="", metavar="TEXT", help="those whose name has TEXT")
    parser.add_argument("--budget-s", type=float, default=240, metavar="S", help="%(default)s")
    parser.add_argument(
        "--table", metavar="FILE", help="write there, not to tuned.json of the operator"
    )
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, meaningless times")
    return parser


if __name__ == "__main__":
    sys.exit(main())
