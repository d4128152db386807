"""Cases that tests and benchmarks of `short_conv` share, and their tolerances."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase
from pallas_kernels.short_conv.api import short_conv


@dataclass(frozen=True)
class Case:
    """One size: K taps, X channels; `documents` are lengths inside a row, the rest is padding."""

    B: int
    T: int
    K: int
    X: int
    documents: tuple[int, ...] = ()
    initial_state: bool = False
    activation: str | None = "silu"
    dtype: str = "float32"


# relative root mean square against float32
TOLERANCE = {"float32": 1e-6, "bfloat16": 8e-3}

CASES = {
    "one": Case(2, 1, 4, 6, initial_state=True),
    "shorter_than_taps": Case(2, 2, 4, 6, initial_state=True, documents=(1, 1)),
    "odd": Case(2, 63, 4, 10, initial_state=True),
    "one_tap": Case(1, 9, 1, 6, initial_state=True),
    "linear": Case(1, 65, 3, 6, activation=None),
    "packed": Case(2, 65, 4, 6, documents=(1, 2, 30, 20), initial_state=True),
    "low_precision": Case(2, 65, 4, 6, documents=(30, 30), dtype="bfloat16"),
}


def make_inputs(case: Case, seed: int = 0) -> dict[str, jax.Array | None]:
    """Arguments of `short_conv` by name."""
    keys = jax.random.split(jax.random.key(seed), 3)
    row = [i + 1 for i, length in enumerate(case.documents) for _ in range(length)]
    ids = jnp.tile(jnp.array(row + [0] * (case.T - len(row)), jnp.int32), (case.B, 1))
    dtype = jnp.dtype(case.dtype)
    state = jax.random.normal(keys[2], (case.B, case.K - 1, case.X)).astype(dtype)
    return {
        "x": jax.random.normal(keys[0], (case.B, case.T, case.X)).astype(dtype),
        "taps": jax.random.normal(keys[1], (case.K, case.X)),
        "segment_ids": ids if case.documents else None,
        "initial_state": state if case.initial_state else None,
    }


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile: q, k or v of K3 and Kimi-Linear, documents packed, with gradients."""
    if platform != "gpu":
        return []

    def both_ways(x, taps, segment_ids, dy):
        conv = lambda x, taps: short_conv(  # noqa: E731
            x, taps, segment_ids=segment_ids, impl="pallas_gpu"
        )[0]
        y, pullback = jax.vjp(conv, x, taps)
        return y, pullback(dy)

    cases = []
    for model, channels in (("K3", 12288), ("Kimi-Linear", 4096)):
        x = jax.ShapeDtypeStruct((1, 8192, channels), jnp.bfloat16)
        taps = jax.ShapeDtypeStruct((4, channels), jnp.float32)
        fn = lambda *a, fn=both_ways: fn(*a)  # noqa: E731
        args = (x, taps, jax.ShapeDtypeStruct((1, 8192), jnp.int32), x)
        cases.append(GateCase(f"short_conv {model}", fn, args, quick=model == "K3"))
    return cases
