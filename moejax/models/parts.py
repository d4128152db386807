"""A model as data before it is arrays: graph, abstract parameters, what each says about itself."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.config import ModelConfig
from moejax.layers.adapter import AdapterSpec
from moejax.layers.moe.placement import Spread
from moejax.layers.param import Balance, param_infos
from moejax.layers.quantised import is_scale
from moejax.models.decoder import AdapterPlan, Decoder, layer_kinds
from moejax.models.grouping import Segment, segments_of
from moejax.partitioning import ParamInfo


class ModelParts(NamedTuple):
    """A decoder split for pure functions; every tree is a nested plain dict.

    Attributes:
      cfg: the model's config.
      graph: nnx graph definition.
      params: ShapeDtypeStruct of every parameter.
      balance: ShapeDtypeStruct of every balancing state.
      infos: ParamInfo of every parameter.
      segments: how layers are grouped.
      options: what the graph was built with.
    """

    cfg: ModelConfig
    graph: Any
    params: dict
    balance: dict
    infos: dict
    segments: tuple[Segment, ...]
    options: dict

    def init(self, key: jax.Array) -> tuple[dict, dict]:
        """Fresh parameters and balancing state; run it inside jit with out_shardings."""
        model = Decoder(self.cfg, nnx.Rngs(params=key), **self.options)
        _, *states = nnx.split(model, nnx.Param, Balance)
        params, balance = map(nnx.to_pure_dict, states)
        return params, balance

    def bind(self, params: dict, balance: dict) -> Decoder:
        """The module with these arrays in it."""
        return nnx.merge(self.graph, params, balance)

    @property
    def num_layers(self) -> int:
        return self.cfg.num_layers

    def moe_layers(self) -> list[int]:
        """Numbers of the layers that have routed experts."""
        return [i for i, kind in enumerate(layer_kinds(self.cfg)) if kind.ffn == "moe"]


def model_parts(
    cfg: ModelConfig, *, track_max_logit: bool = False, watch: bool = False,
    spread: Spread | None = None, adapters: AdapterPlan = (), adapter_dropout: float = 0.0,
    base_format: str = "plain", vision_adapters: tuple[AdapterSpec, ...] = (),
) -> ModelParts:  # fmt: skip
    """The parts of a model, without allocating any of it (2.8 T parameters take seconds).

    Args:
      cfg: the model.
      track_max_logit: layers measure the largest attention logit of each head, for QK-clip.
      watch: layers also say whether their outputs are finite (`bad_attention`, `bad_output`).
      spread: experts may lie in other slots than their numbers say; the balancing state then also
        holds where (`ffn.places`).
      adapters: low-rank adapters of every run's layers (see `moejax.lora`).
      adapter_dropout: share of what they read that is dropped in training.
      vision_adapters: those of every block of the vision tower.
      base_format: form of the large maps outside routed experts, see `moejax.layers.quantised`.
    """
    options: dict[str, Any] = {
        "track_max_logit": track_max_logit, "watch": watch, "spread": spread,
        "adapters": adapters, "adapter_dropout": adapter_dropout, "base_format": base_format,
        "vision_adapters": vision_adapters,
    }  # fmt: skip
    abstract = nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(params=0), **options))
    graph, *states = nnx.split(abstract, nnx.Param, Balance)
    params, balance = states
    infos = param_infos(params)
    segments = segments_of(layer_kinds(cfg))
    return ModelParts(
        cfg, graph, nnx.to_pure_dict(params), nnx.to_pure_dict(balance), infos, segments, options
    )


def flat_infos(infos: dict) -> list[ParamInfo]:
    """ParamInfo in the order of the parameters' leaves."""
    return jax.tree.leaves(infos, is_leaf=lambda node: isinstance(node, ParamInfo))


def num_values(info: ParamInfo, leaf: Any) -> int:
    """Numbers that a parameter stands for: of packed codes two a byte, of scales none."""
    size = math.prod(leaf.shape)
    if is_scale(info.name):
        return 0
    if leaf.dtype != jnp.uint8:
        return size
    return 0 if info.name.endswith("_scales") else 2 * size


def _part_of(name: str) -> str:
    """Which row of the parameter table a dotted name belongs to."""
    for needle, part in (
        (".lora.", "adapters"), ("vision.projector.", "image projector"),
        ("vision.", "vision tower"),
        ("embed.", "embedding"), ("head.", "head"), (".experts.", "routed experts"),
        (".shared.", "shared experts"), (".router.", "router"), (".indexer.", "indexer"),
        ("latent_", "latent maps"), ("mix.", "attention residuals"), ("norm.", "norms"),
        (".attn.", "attention"), (".ffn.", "dense feed-forward"),
    ):  # fmt: skip
        if (
            name.startswith(needle)
            if not needle.startswith(".") and needle.endswith(("embed.", "head."))
            else needle in name
        ):
            return part
    return "other"


def count_by_part(parts: ModelParts) -> dict[str, int]:
    """Parameters by part; router biases (state) count with the router, as published totals do."""
    counts: dict[str, int] = {}
    for info, leaf in zip(flat_infos(parts.infos), jax.tree.leaves(parts.params), strict=True):
        part = _part_of(info.name)
        counts[part] = counts.get(part, 0) + num_values(info, leaf)
    biases = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parts.balance))
    if biases:
        counts["router"] = counts.get("router", 0) + biases
    return counts


def count_total_and_active(parts: ModelParts) -> tuple[int, int]:
    """All parameters, and those that a token uses.

    It uses every one but the input embedding and the experts not chosen.
    """
    counts = count_by_part(parts)
    total, moe = sum(counts.values()), parts.cfg.moe
    routed = counts.get("routed experts", 0)
    idle = routed - routed * moe.top_k // moe.num_experts
    embedding = 0 if parts.cfg.tie_embeddings else counts["embedding"]
    return total, total - idle - embedding
