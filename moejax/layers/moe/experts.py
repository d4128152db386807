"""The routed experts' weights, and their pass over rows sorted by expert."""

from __future__ import annotations

import functools

import jax
from flax import nnx

from moejax.config import FfnConfig, MoeConfig
from moejax.layers.adapter import Adapter
from moejax.layers.param import weight
from moejax.memory import names
from moejax.memory.names import tag
from pallas_kernels.grouped_matmul import grouped_matmul, mxfp4

# Maps of an expert: our leaf, and the published name under which an adapter of it sits.
_MAPS = {"gate_up": "gate_up_proj", "down": "down_proj"}


class Experts(nnx.Module):
    """E gated feed-forward experts of inner width F on width L.

    With ``expert_format="mxfp4"`` they are packed along their input dim and frozen: beside each
    leaf there is one of scales. Adapters in `lora` (`gate_up_proj`, `down_proj`) ride in the same
    products.
    """

    def __init__(self, width: int, cfg: MoeConfig, ffn: FfnConfig, std: float, rngs: nnx.Rngs):
        E, F = cfg.num_experts, cfg.expert_dim
        self.activation = ffn.activation
        self.betas = (ffn.situ_beta, ffn.situ_linear_beta)
        up_axes = ("experts", "expert_embed", None, "ffn")
        self.gate_up = weight(rngs, (E, width, 2, F), up_axes, std=std, matrix=(-3, -1))
        self.down = weight(rngs, (E, F, width), ("experts", "ffn", "expert_embed"), std=std)
        if cfg.expert_format == "mxfp4":
            self.gate_up, self.gate_up_scales = _packed(self.gate_up)
            self.down, self.down_scales = _packed(self.down)

    def weights(self) -> dict[str, jax.Array]:
        """Weights as they are stored: the exchange casts and gathers them."""
        return {name: param[...] for name, param in self._params().items()}

    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical axes of the weights, experts on dim 0 but where all share them."""
        return {name: param.get_metadata()["axes"] for name, param in self._params().items()}

    def _params(self) -> dict[str, nnx.Param]:
        params = {name: getattr(self, name) for name in _MAPS}
        if hasattr(self, "gate_up_scales"):
            params |= {f"{name}_scales": getattr(self, f"{name}_scales") for name in _MAPS}
        for name, adapter in self._adapters().items():
            params |= {f"{name}_a": adapter.a, f"{name}_b": adapter.b}
        return params

    def _adapters(self) -> dict[str, Adapter]:
        lora = getattr(self, "lora", None)
        found = {name: getattr(lora, published, None) for name, published in _MAPS.items()}
        return {name: adapter for name, adapter in found.items() if adapter is not None}

    @staticmethod
    def prepare(weights: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Gate and up side by side, as one product takes them.

        On TPUs this moves every value, so it is done once and not for each round of rows.
        """
        both = {name for name in ("gate_up", "gate_up_scales", "gate_up_b") if name in weights}
        return weights | {n: weights[n].reshape(*weights[n].shape[:2], -1) for n in both}

    def row_fn(self):
        """``(prepared weights, rows, group_sizes) -> rows``: each row through its expert.

        It closes over no array.
        """
        lora_scales = {name: adapter.scale for name, adapter in self._adapters().items()}
        return functools.partial(
            run_rows, activation=self.activation, betas=self.betas, lora_scales=lora_scales
        )


def _packed(plain: nnx.Param) -> tuple[nnx.Param, nnx.Param]:
    """Codes and scales of a map [E, in, ...], laid out as it is."""
    value, meta = plain[...], plain.get_metadata()
    about = {name: meta[name] for name in ("axes", "matrix", "head_axis")}
    E, K, *out = value.shape
    codes, scales = (
        nnx.Param(part.reshape(E, -1, *out), **about)
        for part in mxfp4.encode(value.reshape(E, K, -1))
    )
    return codes, scales


def run_rows(
    weights: dict[str, jax.Array],
    rows_RL: jax.Array,
    group_sizes_e: jax.Array,
    *,
    activation: str,
    betas: tuple,
    lora_scales: dict[str, float],
) -> jax.Array:
    """Rows sorted by expert through their experts; rows past the last group give 0."""

    def mapped(name: str, rows, activation=None):
        lora = (weights[f"{name}_a"], weights[f"{name}_b"]) if name in lora_scales else None
        return grouped_matmul(
            rows, weights[name], group_sizes_e, activation=activation, situ_betas=betas,
            scales=weights.get(f"{name}_scales"), lora=lora,
            lora_scale=lora_scales.get(name, 1.0),
        )  # fmt: skip

    hidden_RF = tag(mapped("gate_up", rows_RL, activation), names.EXPERT_HIDDEN)
    return tag(mapped("down", hidden_RF), names.EXPERT_OUT)
