"""Cases that tests and benchmarks of `kda` share, their tolerances, and what a case costs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gate_case import GateCase


@dataclass(frozen=True)
class Case:
    """One size. `log_decay` is the mean log decay a step; `documents` are lengths inside a row."""

    B: int
    T: int
    N: int
    H: int
    h: int
    Nv: int = 0  # 0: as N
    chunk: int = 64
    log_decay: float = -0.5
    documents: tuple[int, ...] = ()
    initial_state: bool = False
    dtype: str = "float32"


# Relative root mean square against the float32 recurrence. bfloat16: the limits that
# flash-linear-attention tests its own kernels with.
TOLERANCE = {
    "float32": {"*": 2e-6, "d_log_decay": 1e-5},
    "bfloat16": {"*": 8e-3, "out0": 5e-3, "out1": 5e-3, "d_log_decay": 2e-2, "d_beta": 2e-2},
}

CASES = {
    "tiny": Case(2, 32, 2, 8, 8, chunk=16),
    "one": Case(2, 1, 2, 16, 8, initial_state=True),
    "short_of_chunk": Case(1, 63, 2, 16, 8, initial_state=True),
    "chunk": Case(1, 64, 2, 16, 8),
    "past_chunk": Case(1, 65, 2, 16, 8, initial_state=True),
    "odd": Case(1, 257, 2, 16, 8, initial_state=True),
    "long_chunk": Case(1, 100, 1, 8, 8, chunk=128),
    "chunk_of_one": Case(1, 9, 1, 8, 8, chunk=1),
    "packed": Case(2, 130, 2, 16, 8, documents=(5, 60, 1, 40), initial_state=True),
    "packed_odd": Case(1, 193, 1, 8, 16, documents=(63, 64, 65), chunk=32),
    "grouped": Case(2, 70, 2, 16, 8, Nv=4, initial_state=True),
    "fast_decay": Case(1, 130, 2, 16, 8, log_decay=-20.0, initial_state=True),
    "slow_decay": Case(1, 130, 2, 16, 8, log_decay=-1e-4, initial_state=True),
    "low_precision": Case(2, 130, 2, 16, 8, dtype="bfloat16", documents=(50, 70)),
}

# Sizes to time. `model` is one layer of the test model, the others are those of the README.
BENCHES = {
    "model": Case(8, 256, 4, 16, 16),
    "medium": Case(1, 1024, 4, 64, 64),
    "wide": Case(1, 2048, 4, 128, 128),
    "kimi_linear": Case(4, 8192, 32, 128, 128, dtype="bfloat16"),
    "kimi_k3": Case(1, 8192, 96, 128, 128, dtype="bfloat16"),
}


def make_inputs(case: Case, seed: int = 0) -> dict[str, jax.Array | None]:
    """Arguments of `kda` by name; keys and queries at unit length, padding behind the documents."""
    keys = jax.random.split(jax.random.key(seed), 6)
    B, T, N, H, h, Nv = case.B, case.T, case.N, case.H, case.h, case.Nv or case.N
    q, k = (_unit(jax.random.normal(key, (B, T, N, H))) for key in keys[:2])
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], (B, T, Nv)))
    dtype = jnp.dtype(case.dtype)
    state = jax.random.normal(keys[5], (B, Nv, H, h)) if case.initial_state else None
    return {
        "q": q.astype(dtype),
        "k": k.astype(dtype),
        "v": jax.random.normal(keys[2], (B, T, Nv, h)).astype(dtype),
        "log_decay": case.log_decay * jax.random.exponential(keys[3], (B, T, Nv, H)),
        "beta": beta.astype(dtype),
        "segment_ids": segment_ids(case.documents, B, T) if case.documents else None,
        "initial_state": state,
    }


def segment_ids(documents: tuple[int, ...], B: int, T: int) -> jax.Array:
    """1, 2, ... for documents of these lengths, then 0 to the end of the row; [B, T]."""
    ids = [i + 1 for i, length in enumerate(documents) for _ in range(length)]
    return jnp.tile(jnp.array(ids + [0] * (T - len(ids)), jnp.int32), (B, 1))


def flops(case: Case, *, backward: bool = False) -> int:
    """Floating-point operations of the chunked form, the inside of a chunk computed once."""
    H, h, c = case.H, case.h, case.chunk
    forward = 6 * H * h + c * (6 * H + 4 * h) + c * c
    per_token = 14 * H * h + 22 * c * H if backward else forward
    return per_token * case.B * case.T * (case.Nv or case.N)


def least_bytes(case: Case, *, backward: bool = False) -> int:
    """Bytes of inputs and outputs, each moved once; backward also the states at chunk entries."""
    size = jnp.dtype(case.dtype).itemsize
    heads = case.Nv or case.N
    per_head = size * (2 * case.H + 2 * case.h + 1) + 4 * case.H
    if backward:
        per_head = 2 * per_head + 8 * case.H * case.h // case.chunk
    return per_head * case.B * case.T * heads


def _unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def gate_cases(platform: str) -> list[GateCase]:
    """What must compile at the sizes of Kimi K3 and Kimi Linear."""
    makers = {"gpu": _gpu_gate_cases, "tpu": _tpu_gate_cases}
    return makers[platform]() if platform in makers else []


def _gpu_gate_cases() -> list[GateCase]:
    kernels = ("kda_prep", "kda_scan")
    return [
        case
        for name, bound in (("kimi_k3", -5.0), ("kimi_linear", None))
        for case in (
            GateCase(
                f"kda forward {name}", fused_output(bound), fused_shapes(BENCHES[name]), kernels,
                quick=name == "kimi_k3",
            ),
            GateCase(
                f"kda backward {name}", fused_gradients(bound), fused_shapes(BENCHES[name]),
                (*kernels, "kda_grads_states", "kda_grads_pairs"), quick=name == "kimi_k3",
            ),
        )
    ]  # fmt: skip


def _tpu_gate_cases() -> list[GateCase]:
    k3, linear = BENCHES["kimi_k3"], BENCHES["kimi_linear"]
    sizes = {"kimi_k3": (k3, -5.0), "kimi_linear": (linear, None)}
    sizes["kimi_k3 T4096"] = replace(k3, T=4096), -5.0
    return [
        GateCase(f"kda {direction} {name}", make(bound), fused_shapes(case), quick=case is k3)
        for name, (case, bound) in sizes.items()
        for direction, make in (("forward", fused_output), ("backward", fused_gradients))
    ]


def fused_shapes(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of q, k, v, gate, beta_logits, a_log, dt_bias and segment ids of `kda_fused`."""
    B, T, N, H, h, Nv = case.B, case.T, case.N, case.H, case.h, case.Nv or case.N
    tokens = ((N, H), (N, H), (Nv, h), (Nv, H), (Nv,))
    return (
        *(jax.ShapeDtypeStruct((B, T, *dims), jnp.dtype(case.dtype)) for dims in tokens),
        *(jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((Nv,), (Nv, H))),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )


def fused_output(lower_bound: float | None) -> Callable[..., Any]:
    """Output and final state from what `fused_shapes` lists."""
    from pallas_kernels.kda import kda_fused  # which imports kernels, which some users do not need

    def forward(*args: jax.Array) -> Any:
        return kda_fused(*args[:7], lower_bound=lower_bound, segment_ids=args[7], impl="pallas")

    return forward


def fused_gradients(lower_bound: float | None) -> Callable[..., Any]:
    """Gradients of all floating inputs from what `fused_shapes` lists."""
    forward = fused_output(lower_bound)

    def backward(*args: jax.Array) -> Any:
        (out, state), pullback = jax.vjp(lambda *floats: forward(*floats, args[7]), *args[:7])
        return pullback((out, state))

    return backward
