"""attn_res in two phases: finished blocks for many queries at once, then one running source."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.attn_res.chunked import scores, weighted_sum


class BankMix(NamedTuple):
    """Mix over the bank alone and what merging another source needs.

    mix: softmax-weighted mean of the bank. max: largest logit. total: sum of exp(logit - max).
    """

    mix: Float[Array, "... B T D"]
    max: Float[Array, "... B T"]
    total: Float[Array, "... B T"]


def mix_bank(
    queries: Float[Array, "Y D"],
    norm_weights: Float[Array, "Y D"],
    bank: Float[Array, "X B T D"],
    *,
    eps: float,
) -> BankMix:
    """Phase 1: what Y sublayers of one block take from the blocks finished before it.

    The bank is the same for all of them, so this needs no sublayer output and runs batched.
    The backward scores the bank again instead of keeping its normalised copies.

    Args:
      queries, norm_weights: one row per sublayer.
      bank: at least one source.
      eps: of the RMS norm.
    Returns:
      BankMix with a leading Y, float32.
    Raises:
      ValueError: the bank is empty.
    """
    if bank.shape[0] == 0:
        raise ValueError("bank holds 0 sources. Give at least the embedding.")
    one = functools.partial(_mix_bank, eps)
    return jax.vmap(one, in_axes=(0, 0, None))(queries, norm_weights, bank)


def merge_source(
    bank_mix: BankMix,
    query: Float[Array, " D"],
    norm_weight: Float[Array, " D"],
    source: Float[Array, "B T D"],
    *,
    eps: float,
) -> Float[Array, "B T D"]:
    """Phase 2: the mix of bank and one more source P with logit z, m' = max(m, z).

    mix = (e^(m - m') total bank_mix + e^(z - m') P) / (e^(m - m') total + e^(z - m'))

    Args:
      bank_mix: of this sublayer, without the leading Y.
      query, norm_weight: of this sublayer.
      source: the running partial sum.
    Returns:
      [B, T, D] in the source's dtype.
    """
    return _merge_source(eps, bank_mix, query, norm_weight, source)


def mix_two_phase(
    query: Float[Array, " D"],
    norm_weight: Float[Array, " D"],
    bank: Float[Array, "X B T D"],
    source: Float[Array, "B T D"],
    *,
    eps: float,
) -> Float[Array, "B T D"]:
    """attn_res of [bank, source], by way of both phases."""
    phase_one = mix_bank(query[None], norm_weight[None], bank, eps=eps)
    only = jax.tree.map(lambda a: a[0], phase_one)
    return merge_source(only, query, norm_weight, source, eps=eps)


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _mix_bank(eps, query_D, norm_weight_D, bank_XBTD):
    _, logits_XBT, weights_XBT = scores(query_D, norm_weight_D, bank_XBTD, None, eps)
    max_BT = jnp.max(logits_XBT, axis=0)
    total_BT = jnp.sum(jnp.exp(logits_XBT - max_BT), axis=0)
    return BankMix(weighted_sum(weights_XBT, bank_XBTD), max_BT, total_BT)


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _merge_source(eps, bank_mix, query_D, norm_weight_D, source_BTD):
    _, logits_1BT, _ = scores(query_D, norm_weight_D, source_BTD[None], None, eps)
    max_BT = jnp.maximum(bank_mix.max, logits_1BT[0])
    bank_BT = jnp.exp(bank_mix.max - max_BT) * bank_mix.total
    source_BT = jnp.exp(logits_1BT[0] - max_BT)
    share_BT = (source_BT / (bank_BT + source_BT))[..., None]
    mix_BTD = (1 - share_BT) * bank_mix.mix + share_BT * source_BTD.astype(share_BT.dtype)
    return mix_BTD.astype(source_BTD.dtype)
