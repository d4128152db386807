"""`sparse_flash_attention` beside dense attention under a mask of the chosen keys.

python -m pallas_kernels.sparse_flash_attention.bench
"""

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.foreign import cudnn_attention
from pallas_kernels.mla_attention.specs import spread_indices
from pallas_kernels.sparse_flash_attention import sparse_flash_attention, specs

_CASE = specs.LARGE
# The same queries and choices over four times the rows: a query's time must not follow S.
_SHORT = specs.Case(1, 256, 2048, 8, 64, 16, 128)
_LONG = specs.Case(1, 256, 8192, 8, 64, 16, 128)
_NAMES = ("q_latent", "q_rope", "latent", "k_rope", "indices")


def comparisons() -> list[Comparison]:
    """Forward, and with the gradients of queries and rows; and that over four times the rows."""
    c, long = _CASE, _LONG
    return both_ways(
        "sparse_flash_attention", f"J{c.J} S{c.S} N{c.N} C{c.C} R{c.R}", "masked dense",
        _sparse, masked_dense, _make, argnums=(0, 1, 2, 3), forward=(3, 8), backward=(3, 8),
    ) + both_ways(
        "sparse_flash_attention", f"T{long.T} J{long.J} S{long.S} N{long.N} C{long.C} R{long.R}",
        f"rows among the first {_SHORT.S}", _sparse, _of_short, _make_long, argnums=(0, 1, 2, 3),
        forward=(1 / 1.5, None), backward=(1 / 1.5, None),
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


def _of_short(
    q_latent: jax.Array, q_rope: jax.Array, latent: jax.Array, k_rope: jax.Array, indices: jax.Array
) -> jax.Array:
    # strided, so that they stay distinct
    S, every = _SHORT.S, _LONG.S // _SHORT.S
    return _sparse(q_latent, q_rope, latent[:, :S], k_rope[:, :S], indices // every)


def _make_long() -> tuple[jax.Array, ...]:
    inputs = _LONG.inputs()
    every = _LONG.S // _SHORT.S
    inputs["indices"] = _SHORT.indices() * every + inputs["indices"] % every
    return tuple(inputs[name] for name in _NAMES)


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3.1's heads: the last 8 K queries of 32 K, beside dense attention on expanded heads."""
    T, S, N, C, R, H, J = (
        (4, 70, 3, 16, 16, 16, 40) if toy else (8192, 32768, 96, 512, 64, 128, 2048)
    )
    scale = (H + R) ** -0.5

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 4)
        shapes = (1, T, N, C), (1, T, N, R), (1, S, C), (1, S, R)
        floats = (jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True))
        return *floats, spread_indices(key, T, S, J)

    def call(*args: jax.Array, impl: str) -> jax.Array:
        return sparse_flash_attention(*args, scale=scale, impl=impl)[0]

    def dense(q_latent, q_rope, latent, k_rope, indices):
        """As much work as expanded heads are; its numbers mean nothing."""
        q = jnp.concatenate([q_latent[..., :H], q_rope], -1)
        heads = lambda x: jnp.broadcast_to(x[:, :, None], (1, S, N, x.shape[-1]))  # noqa: E731
        k, v = jnp.concatenate([latent[..., :H], k_rope], -1), latent[..., :H]
        out = cudnn_attention(q, heads(k), heads(v), scale=scale, causal=False)
        return jnp.pad(out, ((0, 0), (0, 0), (0, 0), (0, C - H)))

    pairs = T * J * N
    return [
        DeviceCase(
            "sparse_flash_attention", f"{'toy' if toy else 'K3.1'} T{T} S{S} N{N} C{C} R{R} J{J}",
            make, call, argnums=(0, 1, 2, 3),
            flops=(2 * pairs * (2 * C + R), 2 * pairs * (5 * C + 3 * R)), tolerance=1e-2,
            # a causal one would leave out an eighth of the pairs
            others={"cuDNN on expanded heads, no mask": dense},
            target=">= 2 x chunked, the form of small operators, and >= 2 x cuDNN; "
            "forward >= 300 TFLOP/s, backward >= 110",
        )
    ]  # fmt: skip


def _make() -> tuple[jax.Array, ...]:
    inputs = _CASE.inputs()
    return tuple(inputs[name] for name in _NAMES)


if __name__ == "__main__":
    print_all(comparisons())
