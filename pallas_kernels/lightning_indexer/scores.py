"""Index scores of a block of queries, shared by the indexer and its loss."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.blocks import accum_dtype, zeros_of


def weight_factor(num_heads: int, head_dim: int) -> float:
    """U^-1/2 u^-1/2. It moves no choice, but it is the temperature of the indexer's loss."""
    return num_heads**-0.5 * head_dim**-0.5


def head_dots(q_BtUu: jax.Array, keys: jax.Array) -> jax.Array:
    """<q, k> of each indexer head, [B, t, U, S]; keys [B, S, u], or [B, t, J, u] chosen a query."""
    spec = "BtUu,BSu->BtUS" if keys.ndim == 3 else "BtUu,BtSu->BtUS"
    return jnp.einsum(spec, q_BtUu, keys, preferred_element_type=accum_dtype(q_BtUu))


def index_scores(dots_BtUS: jax.Array, w_BtU: jax.Array, head_dim: int) -> jax.Array:
    """sum over heads of factor * w * relu(dot), [B, t, S]."""
    factor = weight_factor(w_BtU.shape[-1], head_dim)
    w = factor * w_BtU.astype(dots_BtUS.dtype)
    return jnp.sum(w[..., None] * jax.nn.relu(dots_BtUS), axis=2)


def scores_by_head(q_BtUu: jax.Array, k_BSu: jax.Array, w_BtU: jax.Array) -> jax.Array:
    """The same of all keys, [B, t, S], one head after the other: no [B, t, U, S] exists.

    On two CPU cores 4.5 times as fast at U 32, u 128, S 32 K, and as fast as its products alone.
    """
    factor, dtype = weight_factor(*q_BtUu.shape[2:]), accum_dtype(q_BtUu)

    def add(scores_BtS, head):
        q_Btu, w_Bt = head
        dots_BtS = jnp.einsum("Btu,BSu->BtS", q_Btu, k_BSu, preferred_element_type=dtype)
        return scores_BtS + w_Bt[..., None] * jax.nn.relu(dots_BtS), None

    w_UBt = jnp.moveaxis(factor * w_BtU.astype(dtype), 2, 0)
    zero = zeros_of(q_BtUu, (*w_BtU.shape[:2], k_BSu.shape[1]), dtype)
    return lax.scan(add, zero, (jnp.moveaxis(q_BtUu, 2, 0), w_UBt))[0]


def ranked(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """Scores that order keys: -inf where not visible, NaN as the lowest number, -0.0 as 0.0.

    A visible -inf is the lowest number but one: it is above NaN, and not what is not visible.

    -0.0 (a negative weight times relu's 0) ties with 0.0, but a sort puts it below.
    """
    scores = jnp.where(scores == 0, 0, scores)
    least = np.finfo(scores.dtype).min
    lowest, above = float(least), float(np.nextafter(least, 0 * least))
    scores = jnp.where(scores > above, scores, jnp.where(scores <= above, above, lowest))
    return jnp.where(visible, scores, -jnp.inf)
