"""`kda` beside the token scan and beside chunks that keep every matrix.

python -m pallas_kernels.kda.bench
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.benching.comparison import Comparison, both_ways, gradients, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.foreign import jla_kda
from pallas_kernels.kda import gates, kda, kda_fused, specs

_NAMES = ("q", "k", "v", "log_decay", "beta")


def comparisons() -> list[Comparison]:
    """The floors of the README; gradients are those of q, k, v, decays and write strengths."""
    both = tuple(range(len(_NAMES)))
    scan = functools.partial(_call, impl="ref")
    rows = both_ways(
        "kda", _size("medium"), "token scan", _call, scan, functools.partial(_make, "medium"),
        argnums=both, backward=(5, 15),
    )  # fmt: skip
    rows.append(
        Comparison(
            "kda",
            "forward + backward",
            _size("wide"),
            "chunks that keep all matrices",
            gradients(_call, both),
            gradients(keep_all, both),
            functools.partial(_make, "wide"),
            smaller=4,
        )  # fmt: skip
    )
    return rows


def _call(*args: jax.Array, impl: str | None = None) -> jax.Array:
    inputs: dict[str, Any] = dict(zip(_NAMES, args, strict=True))
    return kda(**inputs, impl=impl)[0]


def _make(name: str) -> tuple[jax.Array, ...]:
    inputs = specs.make_inputs(specs.BENCHES[name])
    return tuple(jnp.asarray(inputs[n]) for n in _NAMES)


def _size(name: str) -> str:
    case = specs.BENCHES[name]
    return f"B{case.B} T{case.T} N{case.N} H{case.H}"


def keep_all(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array, beta: jax.Array,
    chunk: int = 64,
) -> jax.Array:  # fmt: skip
    """The chunked form as papers print it: every chunk's matrices at once, kept for the backward.

    Divides by decays, so it needs log decays whose sum over a chunk stays above -80, and inverts by
    powers, so it needs keys that differ; a triangular solve is several times slower on a CPU.
    """
    B, T, N, H = q.shape
    split = lambda x: jnp.moveaxis(x.reshape(B, T // chunk, chunk, N, -1), 3, 1)  # noqa: E731
    q, k, v, g = (split(x) for x in (q * H**-0.5, k, v, log_decay))  # B N K c W
    beta = split(beta[..., None])
    total = jnp.cumsum(g, axis=3)
    grown, shrunk = k * jnp.exp(-total), k * jnp.exp(total)
    eye, below = jnp.eye(chunk), jnp.tril(jnp.ones((chunk, chunk)), -1)
    inner = beta * below * jnp.einsum("...ih,...jh->...ij", shrunk, grown)
    inverse, power = eye - inner, inner @ inner
    for _ in range(chunk.bit_length() - 2):  # (1 + a)^-1 = (1 - a)(1 + a^2)(1 + a^4) ...
        inverse, power = inverse + inverse @ power, power @ power
    u, w = inverse @ (beta * v), inverse @ (beta * shrunk)
    q_in = q * jnp.exp(total)
    scores = jnp.einsum("...ih,...jh->...ij", q_in, grown) * (below + eye)
    k_out = k * jnp.exp(total[..., -1:, :] - total)

    def step(state, chunk_of):
        u, w, q_in, scores, k_out, carry = chunk_of
        fresh = u - w @ state
        out = q_in @ state + scores @ fresh
        return carry[..., None] * state + jnp.swapaxes(k_out, -1, -2) @ fresh, out

    parts = (u, w, q_in, scores, k_out, jnp.exp(total[..., -1, :]))
    _, out = lax.scan(
        step, jnp.zeros((B, N, H, v.shape[-1])), [jnp.moveaxis(x, 2, 0) for x in parts]
    )
    return out.transpose(1, 0, 3, 2, 4).reshape(B, T, N, -1)


def device_cases(toy: bool) -> list[DeviceCase]:
    """From raw inputs to the output, at the sizes of Kimi K3 and Kimi Linear."""
    if toy:
        return [_device_case("toy", specs.Case(1, 128, 1, 16, 16, dtype="bfloat16"), -5.0)]
    k3, linear = specs.BENCHES["kimi_k3"], specs.BENCHES["kimi_linear"]
    return [
        _device_case("Kimi Linear", linear, None, ">= 1.3 x FLA forward + backward"),
        _device_case("K3", k3, -5.0, ">= 3 x chunked"),
    ]


def _device_case(
    name: str, case: specs.Case, lower_bound: float | None, target: str = ""
) -> DeviceCase:
    B, T, N, H = case.B, case.T, case.N, case.H

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 7)
        shapes = [(B, T, N, H)] * 4 + [(B, T, N)]
        drawn = [jax.random.normal(k, s, case.dtype) for k, s in zip(keys, shapes, strict=False)]
        weights = jax.random.normal(keys[5], (N,)) * 0.3, jax.random.normal(keys[6], (N, H))
        return (*drawn, *weights)

    def by_jla(q: Any, k: Any, v: Any, gate: Any, beta: Any, a_log: Any, dt_bias: Any) -> jax.Array:
        log_decay = gates.log_decay(gate, a_log, dt_bias, lower_bound)
        return jla_kda(q, k, v, log_decay, gates.write_strength(beta))

    return DeviceCase(
        "kda", f"{name} B{B} T{T} N{N} H{H}", make,
        lambda *a, impl: kda_fused(*a, lower_bound=lower_bound, impl=impl)[0],
        argnums=tuple(range(7)),
        flops=(specs.flops(case), specs.flops(case, backward=True)), tolerance=2e-2,
        # the state at the start of every chunk, written and read in two bytes
        kept=2 * 2 * B * N * H * case.h * (T // case.chunk),
        others={"jax-linear-attention": by_jla}, torch=("fla",),
        dims={"B": B, "T": T, "N": N, "H": H, "lower_bound": lower_bound}, target=target,
    )  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
