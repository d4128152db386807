"""Times the implementations of `kda` on this machine: `python -m pallas_kernels.kda.bench [cases]`.

Forward and forward with all gradients, interleaved, best of several rounds after a warm-up;
temporaries as the compiler states them.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp

from pallas_kernels.kda import kda, specs

_IMPLS = ("chunked", "ref")


def _programs(case, inputs):
    """(implementation, "f" or "f+b") -> compiled program."""

    def value(inputs, impl):
        out, _ = kda(**inputs, chunk=case.chunk, impl=impl)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    programs = {}
    for impl in _IMPLS:
        programs[impl, "f"] = jax.jit(lambda x, impl=impl: value(x, impl))
        programs[impl, "f+b"] = jax.jit(jax.grad(lambda x, impl=impl: value(x, impl)))
    return {name: fn.lower(inputs).compile() for name, fn in programs.items()}


def _best_s(programs, inputs, rounds):
    best = dict.fromkeys(programs, float("inf"))
    for i in range(rounds + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(inputs))
            if i:  # the first round warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def run(name: str, rounds: int = 5) -> dict[str, float]:
    """Times one case, prints its lines, and returns the ratios ref / chunked that they show."""
    case = specs.BENCHES[name]
    inputs = {n: a for n, a in specs.make_inputs(case).items() if a is not None}
    programs = _programs(case, inputs)
    best = _best_s(programs, inputs, rounds)
    temp = {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()}
    print(f"{name}: B{case.B} T{case.T} N{case.N} H{case.H} h{case.h} {case.dtype}")
    ratios = {}
    for what in ("f", "f+b"):
        flops = specs.flops(case) + (specs.flops(case, backward=True) if what == "f+b" else 0)
        for impl in _IMPLS:
            seconds = best[impl, what]
            megabytes = temp[impl, what] / 1e6
            print(
                f"  {what:4} {impl:8} {1e3 * seconds:9.1f} ms  {megabytes:8.1f} MB temp"
                f"  {flops / seconds / 1e9:7.1f} GFLOP/s of the chunked form"
            )
        ratios[f"time {what}"] = best["ref", what] / best["chunked", what]
        ratios[f"memory {what}"] = temp["ref", what] / max(temp["chunked", what], 1)
    print("  ref / chunked: " + ", ".join(f"{n} {r:.1f}x" for n, r in ratios.items()))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["model", "medium"], help="of specs.BENCHES")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {os.cpu_count()} cores")
    for name in args.cases:
        if name not in specs.BENCHES:
            parser.error(f"no case {name!r}. Use one of {', '.join(specs.BENCHES)}.")
        run(name, args.rounds)


if __name__ == "__main__":
    main()
