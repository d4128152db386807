"""How much of the attention an indexer's choice keeps, beside the best choice of as many keys."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.blocks import visible


class Mass(NamedTuple):
    """Attention mass of keys, summed over the queries of each row that see more than J keys.

    Attributes:
      chosen: of the keys that the indexer chose.
      random: expected, of J visible keys drawn alike.
      best: of the J keys with most of it; `chosen / best` is the indexer's recall.
    """

    chosen_B: jax.Array
    random_B: jax.Array
    best_B: jax.Array


def chosen_mass(
    q_latent: Float[Array, "B T N C"], q_rope: Float[Array, "B T N R"],
    latent: Float[Array, "B T C"], k_rope: Float[Array, "B T R"], indices: Int[Array, "B T J"],
    segment_ids: Int[Array, "B T"], *, scale: float,
) -> Mass:  # fmt: skip
    """Mass of dense causal attention, the mean over heads, on chosen, random and best keys.

    Holds [B, N, T, T]: a measure for rows of some hundred positions, no part of training.

    Args:
      q_latent, q_rope, latent, k_rope: absorbed queries and rows, as of `sparse_flash_attention`.
      indices: chosen positions, -1 for an empty slot.
      segment_ids: document numbers, 0 = padding.
      scale: of the logits.
    """
    T, J = indices.shape[1:]
    places_T = jnp.arange(T, dtype=jnp.int32)
    mask_BTT = visible(segment_ids, segment_ids, places_T, places_T)
    z_BNTT = jnp.einsum("btnc,bsc->bnts", q_latent, latent)
    z_BNTT = scale * (z_BNTT + jnp.einsum("btnr,bsr->bnts", q_rope, k_rope))
    z_BNTT = jnp.where(mask_BTT[:, None], z_BNTT.astype(jnp.float32), -jnp.inf)
    count_BT = mask_BTT.sum(-1)
    # fewer keys than J are all chosen: such queries say nothing, and may see no key at all
    counted_BT = count_BT > J
    p_BTT = jax.nn.softmax(jnp.where(counted_BT[:, None, :, None], z_BNTT, 0.0), axis=-1).mean(1)
    taken_BTJ = jnp.take_along_axis(p_BTT, jnp.maximum(indices, 0), axis=-1)
    sums = (
        jnp.where(indices >= 0, taken_BTJ, 0).sum(-1),
        J / jnp.maximum(count_BT, 1),
        jax.lax.top_k(p_BTT, min(J, T))[0].sum(-1),
    )
    return Mass(*(jnp.where(counted_BT, mass_BT, 0).sum(-1) for mass_BT in sums))
