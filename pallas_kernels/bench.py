"""Every kernel at its real sizes on the present device, beside XLA and other libraries.

    python -m pallas_kernels.bench --budget-s=300 [--ops=kda,permute] [--out=bench.jsonl]

First each operator's outputs and gradients against its chunked form in float32, then times, forward
and forward + backward. A JSON object a line as soon as something is known, a table at the end. On a
CPU, or with --dry-run, everything runs at toy sizes, kernels in Pallas' interpreter on a CPU: that
shows that the bench works, its times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import jax

from pallas_kernels.benching import ceilings as ceiling
from pallas_kernels.benching import foreign
from pallas_kernels.benching.comparison import machine, temp_bytes
from pallas_kernels.benching.device_case import (
    DeviceCase,
    both_directions,
    forward,
    relative_errors,
    upcast,
)
from pallas_kernels.benching.report import table
from pallas_kernels.benching.timing import Budget, device_seconds, once
from pallas_kernels.choose import target_platform

# Folders with a bench.py, in the order of what matters, should the time end.
_FIRST = ("kda", "grouped_matmul", "permute", "linear_xent", "attn_res", "gated_norm", "short_conv")
_FOUND = pathlib.Path(__file__).parent.glob("*/bench.py")
OPS = tuple(dict.fromkeys((*_FIRST, *sorted(path.parent.name for path in _FOUND))))
_DIRECTIONS = ("forward", "forward + backward")
_SETS = 3


class Bench(NamedTuple):
    """What every step needs.

    Attributes:
      budget: time that is left.
      seconds: the clock.
      ceilings: of the device.
      lines: where lines go.
      ours: name of our kernels.
      sets: of arguments that take turns.
      programs: compiled so far, by case, implementation and direction.
    """

    budget: Budget
    seconds: Callable[..., float]
    ceilings: ceiling.Ceilings
    lines: Sequence[TextIO]
    ours: str
    sets: int
    programs: dict[tuple[str, ...], Any]

    def compiled(self, case: DeviceCase, name: str, what: str, args: Any, cotangents: Any) -> Any:
        """A program of arguments and cotangents; the same one at the next call."""
        key = (case.name, name, what, str(jax.tree.map(lambda x: x.dtype, args)))
        if key not in self.programs:
            fn = case.function(name)
            run = forward(fn) if what == "forward" else both_directions(fn, case.argnums)
            lowered = jax.jit(run).lower(args, cotangents)
            self.programs[key] = lowered.compile(compiler_options=compiler_options())
        return self.programs[key]

    def tell(self, **facts: Any) -> dict[str, Any]:
        """Writes a line, at once."""
        for stream in self.lines:
            print(json.dumps(facts), file=stream, flush=True)
        return facts


def check(bench: Bench, case: DeviceCase) -> dict[str, Any]:
    """Errors of outputs and gradients against the chunked form in float32."""
    facts: dict[str, Any] = {"kind": "check", "op": case.op, "size": case.size, "impl": bench.ours}
    began = time.perf_counter()
    if not bench.budget.allows():
        return bench.tell(**facts, status="out of time")
    try:
        args, cotangents = draw(case, 0)
        found = bench.compiled(case, bench.ours, _DIRECTIONS[-1], args, cotangents)(
            args, cotangents
        )
        args, cotangents = upcast(args), upcast(cotangents)
        with jax.default_matmul_precision("highest"):
            exact = bench.compiled(case, "chunked", _DIRECTIONS[-1], args, cotangents)
        values = relative_errors(*map(jax.tree.leaves, (found, exact(args, cotangents))))
        errors = [float(e) for e in values]
        held = all(e <= case.tolerance for e in errors)
        facts |= {"status": "ok" if held else "wrong", "tolerance": case.tolerance}
        facts |= {"errors": errors, "worst": max(errors)}
    except Exception as error:  # a kernel that fails must not end the bench
        facts |= _reason(error)
    bench.budget.took(time.perf_counter() - began)
    return bench.tell(**facts)


def timings(bench: Bench, case: DeviceCase) -> Iterator[dict[str, Any]]:
    """A line for each implementation and direction; ours first."""
    sets: list[Any] = []
    for what in _DIRECTIONS if case.argnums else _DIRECTIONS[:1]:
        for name in (bench.ours, "chunked", *case.others):
            facts = {"kind": "time", "op": case.op, "size": case.size, "what": what, "impl": name}
            if not bench.budget.allows():
                yield bench.tell(**facts, status="out of time")
                continue
            began = time.perf_counter()
            try:
                sets = sets or [draw(case, seed) for seed in range(bench.sets)]
                facts |= _time(bench, case, what, name, sets)
            except Exception as error:
                facts |= _reason(error)
            bench.budget.took(time.perf_counter() - began)
            yield bench.tell(**facts)
    del sets
    gc.collect()
    if case.torch:
        yield from _torch(bench, case)


def _time(bench: Bench, case: DeviceCase, what: str, name: str, sets: list[Any]) -> dict[str, Any]:
    began = time.perf_counter()
    program = bench.compiled(case, name, what, *sets[0])
    compiled = time.perf_counter()
    return {
        "status": "ok", **_rates(bench, case, what, bench.seconds(program, sets), sets[0][0]),
        "temporaries": temp_bytes(program), "compile_s": compiled - began,
    }  # fmt: skip


def _rates(bench: Bench, case: DeviceCase, what: str, seconds: float, args: Any) -> dict[str, Any]:
    """Time, and the share of it that arithmetic or traffic must take at the device's best."""
    parts = list(zip(case.flops, case.traffic(args), strict=True))
    parts = parts[:1] if what == "forward" else parts
    flops, moved = (sum(part) for part in zip(*parts, strict=True))
    floor = sum(bench.ceilings.floor_s(f, b) for f, b in parts)
    return {
        "ms": seconds * 1e3, "tflops": flops / seconds / 1e12, "gb_s": moved / seconds / 1e9,
        "floor_ms": floor * 1e3, "share_of_floor": floor / seconds,
    }  # fmt: skip


def _torch(bench: Bench, case: DeviceCase) -> Iterator[dict[str, Any]]:
    facts = {"kind": "time", "op": case.op, "size": case.size}
    began = time.perf_counter()
    try:
        found = foreign.torch_results(case.torch, case.dims, bench.budget.left())
    except Exception as error:
        found = [{"impl": name, "what": "", **_reason(error)} for name in case.torch]
    bench.budget.took(time.perf_counter() - began)
    shapes = jax.eval_shape(case.make, jax.random.key(0))
    for one in found:
        if "ms" in one:
            one |= {"status": "ok", **_rates(bench, case, one["what"], one["ms"] / 1e3, shapes)}
        yield bench.tell(**(facts | {"what": ""} | one))


def compiler_options() -> Any:
    """On a CPU, where no time counts, programs are compiled fast rather than well."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None


def draw(case: DeviceCase, seed: int) -> tuple[Any, Any]:
    """Arguments and cotangents of a case."""
    key, other = jax.random.split(jax.random.key(seed))
    args = jax.jit(case.make)(key)
    return args, case.cotangents(other, args)


def _reason(error: Exception) -> dict[str, str]:
    """What went wrong: a library that is not there, a kernel that declines, or a fault."""
    kinds = {ImportError: "absent", NotImplementedError: "refused", TimeoutError: "out of time"}
    status = next((s for kind, s in kinds.items() if isinstance(error, kind)), "failed")
    return {"status": status, "reason": " ".join(str(error).split())[:300]}


def cases(ops: Sequence[str], toy: bool) -> list[DeviceCase]:
    """The cases of the operators, real or toy."""
    found: list[DeviceCase] = []
    for op in ops:
        module = importlib.import_module(f"pallas_kernels.{op}.bench")
        found += module.device_cases(toy) if hasattr(module, "device_cases") else []
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 where a kernel's results are wrong or it failed."""
    parser = _parser()
    options = parser.parse_args(argv)
    ops = options.ops.split(",")
    if unknown := [op for op in ops if op not in OPS]:
        parser.error(f"no operator {unknown[0]!r}. Known: {', '.join(OPS)}.")
    # torch's side is another process on the same card
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    toy = options.dry_run or jax.default_backend() == "cpu"
    budget, seconds = Budget(options.budget_s), once if toy else device_seconds
    with _streams(options.out) as streams:
        facts = {"kind": "machine", **machine(), **ceiling.card(), "dry_run": toy}
        found = ceiling.measure(seconds, toy=toy)
        ours = "pallas_gpu" if target_platform() == "cpu" else f"pallas_{target_platform()}"
        bench = Bench(
            budget, seconds, found, streams, ours, sets=1 if toy else _SETS, programs={},
        )  # fmt: skip
        bench.tell(**facts, **found._asdict(), libraries=foreign.installed())
        rows = cases(ops, toy)
        checks = [check(bench, case) for case in rows if case.argnums or case.has_floats()]
        times = [line for case in rows for line in timings(bench, case)]
    print(table(facts, found, checks, times, rows))
    return int(any(line["status"] in ("wrong", "failed") for line in checks))


class _streams:
    """The standard output, and the file if one is named."""

    def __init__(self, path: str | None):
        self._file = pathlib.Path(path).open("w") if path else None

    def __enter__(self) -> list[TextIO]:
        return [sys.stdout, *([self._file] if self._file else [])]

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.bench", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "--budget-s", type=float, default=300, metavar="S", help="end after so long: %(default)s"
    )
    parser.add_argument("--ops", default=",".join(OPS), metavar="LIST", help="%(default)s")
    parser.add_argument("--out", metavar="FILE", help="also write the JSON lines there")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes, meaningless times")
    return parser


if __name__ == "__main__":
    sys.exit(main())
