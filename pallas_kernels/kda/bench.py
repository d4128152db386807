"""`kda` beside the token scan and beside chunks that keep every matrix.

python -m pallas_kernels.kda.bench
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.benching.comparison import Comparison, both_ways, gradients, print_all
from pallas_kernels.kda import kda, specs

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


if __name__ == "__main__":
    print_all(comparisons())
