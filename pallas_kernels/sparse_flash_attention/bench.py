"""`sparse_flash_attention` beside dense attention under a mask of the chosen keys.

python -m pallas_kernels.sparse_flash_attention.bench
"""

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.sparse_flash_attention import sparse_flash_attention, specs

_CASE = specs.LARGE
_NAMES = ("q_latent", "q_rope", "latent", "k_rope", "indices")


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of queries and rows."""
    c = _CASE
    return both_ways(
        "sparse_flash_attention", f"J{c.J} S{c.S} N{c.N} C{c.C} R{c.R}", "masked dense",
        _sparse, masked_dense, _make, argnums=(0, 1, 2, 3), forward=(3, 8), backward=(3, 8),
    )  # fmt: skip


def _sparse(*args: jax.Array) -> jax.Array:
    return sparse_flash_attention(*args, **_CASE.options())[0]


def masked_dense(
    q_latent: jax.Array, q_rope: jax.Array, latent: jax.Array, k_rope: jax.Array, indices: jax.Array
) -> jax.Array:
    """All scores, then a softmax over those of the chosen keys."""
    B, T, _ = indices.shape
    S = latent.shape[1]
    at = (jnp.arange(B)[:, None, None], jnp.arange(T)[:, None])
    chosen = jnp.zeros((B, T, S), bool)
    chosen = chosen.at[(*at, jnp.where(indices < 0, S, indices))].set(True, mode="drop")
    q, keys = (jnp.concatenate(x, -1) for x in ((q_latent, q_rope), (latent, k_rope)))
    scores = jnp.einsum("btnc,bsc->bnts", q, keys) * _CASE.options()["scale"]
    weights = jax.nn.softmax(jnp.where(chosen[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsc->btnc", weights, latent)


def _make() -> tuple[jax.Array, ...]:
    inputs = _CASE.inputs()
    return tuple(inputs[name] for name in _NAMES)


if __name__ == "__main__":
    print_all(comparisons())
