"""The routed experts' weights, and their pass over rows sorted by expert."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.param import weight
from pallas_kernels.grouped_matmul import grouped_matmul


class Experts(nnx.Module):
    """E gated feed-forward experts of inner width F on width L."""

    def __init__(self, width: int, cfg: MoeConfig, ffn: FfnConfig, std: float, rngs: nnx.Rngs):
        E, F = cfg.num_experts, cfg.expert_dim
        self.activation = ffn.activation
        self.betas = (ffn.situ_beta, ffn.situ_linear_beta)
        up_axes = ("experts", "expert_embed", None, "ffn")
        self.gate_up = weight(rngs, (E, width, 2, F), up_axes, std=std, matrix=(-3, -1))
        self.down = weight(rngs, (E, F, width), ("experts", "ffn", "expert_embed"), std=std)

    def weights(self) -> dict[str, jax.Array]:
        """Weights as they are stored: the exchange casts and gathers them."""
        return {"gate_up": self.gate_up[...], "down": self.down[...]}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the weights, experts on dim 0."""
        return {name: getattr(self, name).get_metadata()["axes"] for name in ("gate_up", "down")}

    @staticmethod
    def prepare(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Gate and up side by side, as one product takes them.

        On TPUs this moves every value, so it is done once and not for each round of rows.
        """
        gate_up = weights["gate_up"]
        return weights | {"gate_up": gate_up.reshape(*gate_up.shape[:2], -1)}

    def row_fn(self):
        """``(prepared weights, rows, group_sizes) -> rows``: each row through its expert.

        It closes over no array.
        """
        return functools.partial(run_rows, activation=self.activation, betas=self.betas)


def run_rows(
    weights: dict[str, jax.Array],
    rows_RL: jax.Array,
    group_sizes_e: jax.Array,
    *,
    activation: str,
    betas: tuple,
) -> jax.Array:
    """Rows sorted by expert through their experts; rows past the last group give 0."""
    hidden_RF = grouped_matmul(
        rows_RL, weights["gate_up"], group_sizes_e, activation=activation, situ_betas=betas
    )
    return grouped_matmul(hidden_RF, weights["down"], group_sizes_e)
