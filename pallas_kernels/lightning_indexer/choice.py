"""Choosing keys by XLA: exactly, or nearly where that was asked for; and what the latter misses."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels.choose import target_platform
from pallas_kernels.lightning_indexer import threshold

# On a CPU fewer keys than these are found faster by lax.top_k: 0.09 ms against 0.25 for 128 rows of
# 256 scores and 8 keys; at 512 and 64 it is 1.2 against 0.6.
_FEWEST = 32


def choose_keys(
    scores: jax.Array, top_k: int, order: str, approx_recall: float | None
) -> tuple[jax.Array, jax.Array]:
    """Indices and scores [.., J] of the largest scores [.., S]; -1 where the score is -inf.

    J is at most S. Exact choices fall by score, the lower index first in a tie, unless another
    order is as good: by position where asked, and as they are found for "any".
    """
    if approx_recall is None and order != "score" and _by_threshold(scores, top_k):
        return threshold.select(scores, top_k)
    if approx_recall is None:
        values, indices = lax.top_k(scores, top_k)
    else:
        values, indices = lax.approx_max_k(scores, top_k, recall_target=approx_recall)
    indices = jnp.where(values > -jnp.inf, indices, -1).astype(jnp.int32)
    return by_position(indices, values) if order == "position" else (indices, values)


def _by_threshold(scores: jax.Array, top_k: int) -> bool:
    return target_platform() == "cpu" and scores.dtype == jnp.float32 and top_k >= _FEWEST


def by_position(indices: jax.Array, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same choices by rising index, empty slots last."""
    last = jnp.iinfo(jnp.int32).max
    rising, scores = lax.sort((jnp.where(indices < 0, last, indices), scores), num_keys=1)
    return jnp.where(rising == last, -1, rising), scores


def recall(
    chosen: Int[Array, "B T K"], exact: Int[Array, "B T J"], num_keys: int
) -> Float[Array, ""]:
    """Share of the exact choices that are among `chosen`, over all queries; 1 if there are none.

    Args:
      chosen, exact: indices of `lightning_indexer`; outside 0 to `num_keys` - 1 is an empty slot.
    """

    def found(chosen_K, exact_J):
        safe_K = jnp.where(chosen_K < 0, num_keys, chosen_K)
        marked_S = jnp.zeros(num_keys, bool).at[safe_K].set(True, mode="drop")
        there_J = (exact_J >= 0) & (exact_J < num_keys)
        hits = jnp.sum(marked_S[jnp.where(there_J, exact_J, 0)] & there_J)
        return hits.astype(jnp.float32), jnp.sum(there_J).astype(jnp.float32)

    rows = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    hits, wanted = lax.map(lambda pair: found(*pair), (rows(chosen), rows(exact)), batch_size=64)
    return jnp.where(wanted.sum() > 0, hits.sum() / jnp.maximum(wanted.sum(), 1), 1.0)
