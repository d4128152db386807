"""The two distributions of a query over its set of keys, their divergence, and its gradient."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Distributions(NamedTuple):
    """Of each query over its keys x: the target p, log rho = log softmax(I), and the set."""

    target_Btx: jax.Array
    log_rho_Btx: jax.Array
    mask_Btx: jax.Array

    @classmethod
    def of(cls, summed_Btx, scores_Btx, mask_Btx) -> "Distributions":
        """From the main attention's probabilities summed over heads and the index scores.

        Both may hold anything outside the set.
        """
        summed_Btx = jnp.where(mask_Btx, summed_Btx, 0)
        total = summed_Btx.sum(-1, keepdims=True)
        # x / x is not always 1 where a compiler divides by a reciprocal; one key must give KL 0.
        single = mask_Btx.sum(-1, keepdims=True) == 1
        normalised = summed_Btx / jnp.where(total > 0, total, 1)
        target_Btx = jnp.where(single, mask_Btx.astype(total.dtype), normalised)
        return cls(target_Btx, _log_softmax(scores_Btx, mask_Btx), mask_Btx)

    def kl(self):
        """sum p (log p - log rho), with 0 log 0 = 0."""
        p = self.target_Btx
        return jnp.sum(p * (jnp.log(jnp.where(p > 0, p, 1)) - self.log_rho_Btx), axis=-1)

    def dscores(self, dkl_Bt):
        """Gradient of the scores; the sum of p is 1, or 0 for a query that sees no key."""
        p = self.target_Btx
        rho = jnp.where(self.mask_Btx, jnp.exp(self.log_rho_Btx), 0)
        return dkl_Bt[..., None] * (rho * p.sum(-1, keepdims=True) - p)


def _log_softmax(scores_Btx, mask_Btx):
    """Log-softmax over the mask, 0 outside it; exactly 0 for a single key."""
    top = jnp.max(jnp.where(mask_Btx, scores_Btx, -jnp.inf), axis=-1, keepdims=True)
    shifted = jnp.where(mask_Btx, scores_Btx - top, 0)
    total = jnp.where(mask_Btx, jnp.exp(shifted), 0).sum(-1, keepdims=True)
    return jnp.where(mask_Btx, shifted - jnp.log(jnp.where(total > 0, total, 1)), 0)
