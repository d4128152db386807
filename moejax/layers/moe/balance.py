"""Balancing the experts: quantile (QB), bias step, sequence-wise auxiliary loss.

Architecture section 5.2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moejax.config import MoeConfig
from moejax.typing import Array, Bool, Float, Int

NUM_BINS = 1000


def required_bias(
    scores_ME: Float[Array, "M E"], bias_E: Float[Array, " E"], top_k: int
) -> Float[Array, "M E"]:
    """r = α − s: the bias with which expert j would just be chosen by token i.

    α is the token's (k+1)-th biased score.
    """
    alpha_M = lax.top_k(scores_ME + bias_E, top_k + 1)[0][:, -1]
    return alpha_M[:, None] - scores_ME


def quantile_bias(
    scores_ME: Float[Array, "M E"], bias_E: Float[Array, " E"], top_k: int
) -> Float[Array, " E"]:
    """One QB update by sorting: the (k/n)-quantile of each expert's required bias, mean removed.

    With rank q = m k / n it is the mean of the ⌈q⌉-th and (⌊q⌋+1)-th smallest. The plain meaning of
    the update; training uses :func:`histogram` and :func:`quantile_from_histogram`, which add up
    over devices and microbatches.
    Source: Kimi K3 report, equations 13-14.
    """
    M, E = scores_ME.shape
    if top_k >= E:
        return bias_E
    sorted_ME = jnp.sort(required_bias(scores_ME, bias_E, top_k), axis=0)
    whole, rest = divmod(M * top_k, E)
    low = whole if rest else whole - 1  # ⌈q⌉ − 1, counted from 0
    new_E = 0.5 * (sorted_ME[low] + sorted_ME[whole])
    return new_E - jnp.mean(new_E)


def _range(bias_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lowest edge and width of the bins.

    Scores are in (0, 1), so r lies within one of the extreme biases.
    """
    low = jnp.min(bias_E) - 1.0
    return low, (jnp.max(bias_E) + 1.0 - low) / NUM_BINS


def histogram(
    scores_ME: Float[Array, "M E"],
    bias_E: Float[Array, " E"],
    valid_M: Bool[Array, " M"],
    top_k: int,
) -> Int[Array, "E bins"]:
    """Counts of the required bias in `NUM_BINS` bins an expert, over the valid tokens.

    Adds up over any split of the tokens.
    """
    M, E = scores_ME.shape
    if top_k >= E:
        return jnp.zeros((E, NUM_BINS), jnp.int32)
    low, width = _range(bias_E)
    r_ME = required_bias(scores_ME, bias_E, top_k)
    bin_ME = jnp.clip(jnp.floor((r_ME - low) / width), 0, NUM_BINS - 1).astype(jnp.int32)
    flat_ME = bin_ME + NUM_BINS * jnp.arange(E, dtype=jnp.int32)
    counts = jnp.zeros(E * NUM_BINS, jnp.int32)
    valid_ME = jnp.broadcast_to(valid_M[:, None], (M, E)).astype(jnp.int32)
    return counts.at[flat_ME.reshape(-1)].add(valid_ME.reshape(-1)).reshape(E, NUM_BINS)


def quantile_from_histogram(
    counts_EZ: Int[Array, "*X E bins"], bias_E: Float[Array, "*X E"], top_k: int
):
    """The QB update from summed histograms, interpolated in the bin that reaches rank m k / n.

    Within one bin width of the ⌈mk/n⌉-th smallest required bias; interpolation is linear. Leading
    (stacked-layer) dims are allowed; with no token counted, or where every expert is always chosen,
    the bias stays.
    """
    if counts_EZ.ndim > 2:
        return jax.vmap(lambda c, b: quantile_from_histogram(c, b, top_k))(counts_EZ, bias_E)
    E = bias_E.shape[0]
    total = jnp.sum(counts_EZ[0])
    target = total.astype(jnp.float32) * top_k / E
    cumulative_EZ = jnp.cumsum(counts_EZ, axis=-1)
    bin_E = jnp.argmax(cumulative_EZ >= jnp.ceil(target), axis=-1)
    inside_E = jnp.take_along_axis(counts_EZ, bin_E[:, None], 1)[:, 0]
    before_E = jnp.take_along_axis(cumulative_EZ, bin_E[:, None], 1)[:, 0] - inside_E
    part_E = jnp.clip((target - before_E) / jnp.maximum(inside_E, 1), 0, 1)
    low, width = _range(bias_E)
    new_E = low + (bin_E + part_E) * width
    new_E = new_E - jnp.mean(new_E)
    return jnp.where((total > 0) & (top_k < E), new_E, bias_E).astype(bias_E.dtype)


def bias_step(
    load_E: Int[Array, "*X E"], bias_E: Float[Array, "*X E"], rate: float
) -> Float[Array, "*X E"]:
    """``b += rate · sign(mean load − load)``, once a step.

    Source: DeepSeek-V3, arXiv:2412.19437.
    """
    load = load_E.astype(bias_E.dtype)
    return bias_E + rate * jnp.sign(jnp.mean(load, -1, keepdims=True) - load)


def aux_loss_rows(
    scores_BTE: Float[Array, "B T E"], ids_BTA: Int[Array, "B T A"], valid_BT: Bool[Array, "B T"]
) -> Float[Array, " B"]:
    """Sequence-wise auxiliary loss of each row: Σ_e f_e P_e, 1 at perfect balance.

    f_e = E/(A n) · choices of e among the n valid tokens (no gradient), P_e = mean share of e in
    the scores.
    Source: DeepSeek-V3, arXiv:2412.19437, equations 17-20.
    """
    E, A = scores_BTE.shape[-1], ids_BTA.shape[-1]
    valid = valid_BT.astype(scores_BTE.dtype)
    n_B1 = jnp.maximum(jnp.sum(valid, 1, keepdims=True), 1)
    share_BTE = scores_BTE / (jnp.sum(scores_BTE, -1, keepdims=True) + 1e-20)
    mean_BE = jnp.einsum("bte,bt->be", share_BTE, valid) / n_B1
    chosen_BTE = jax.nn.one_hot(ids_BTA, E, dtype=scores_BTE.dtype).sum(2)
    load_BE = jnp.einsum("bte,bt->be", chosen_BTE, valid) * (E / A) / n_B1
    return jnp.sum(lax.stop_gradient(load_BE) * mean_BE, -1)


def new_bias(
    cfg: MoeConfig, bias_E: jax.Array, load_E: jax.Array, counts_EZ: jax.Array | None
) -> jax.Array:
    """The bias for the next step, as the config balances."""
    if cfg.balance == "quantile" and counts_EZ is not None:
        return quantile_from_histogram(counts_EZ, bias_E, cfg.top_k)
    if cfg.balance == "bias_step":
        return bias_step(load_E, bias_E, cfg.bias_rate)
    return bias_E
