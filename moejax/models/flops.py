"""Model FLOPs of a training token: what the maths needs, not what remat or padding adds."""

from __future__ import annotations

from typing import NamedTuple

import jax

from moejax.config import ModelConfig
from moejax.config.vision import MERGE
from moejax.models.parts import ModelParts, flat_infos, num_values

_TOWER, _GRID = "vision.", "vision.grid"


def matmul_params_per_token(parts: ModelParts, chosen: dict | None = None) -> int:
    """Weights that one token is multiplied with.

    All maps and the head; of the experts only those the token uses; none of a vision tower.

    Args:
      parts: the model.
      chosen: for every parameter whether it counts; None = all do.
    """
    moe = parts.cfg.moe
    total = 0
    infos, leaves = flat_infos(parts.infos), jax.tree.leaves(parts.params)
    counts = [True] * len(leaves) if chosen is None else jax.tree.leaves(chosen)
    for info, leaf, counted in zip(infos, leaves, counts, strict=True):
        size = num_values(info, leaf) * counted
        if "experts" in info.axes:
            size = size * moe.top_k // moe.num_experts
        elif ".experts.lora." in info.name:  # a map that all experts share: once for each chosen
            size *= moe.top_k
        is_lookup = info.name.startswith("embed.") and not parts.cfg.tie_embeddings
        is_lookup |= info.name.startswith(_TOWER)
        if len(info.axes) >= 2 and not is_lookup:
            total += size
    return total


def attention_flops_per_token(cfg: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of the attention cores for one token of a row of `seq_len`.

    Causal, so half the keys on average. KDA: three products with the state a head, 6 H h. Dense
    MLA: scores and values over T/2 keys. DSA: the same over at most J keys, and the indexer's
    scores over T/2.
    """
    kda, mla, dsa = cfg.kda, cfg.mla, cfg.dsa
    keys = seq_len / 2
    per_key = 2 * mla.num_heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    of_kind = {
        "kda": 6.0 * kda.num_heads * kda.head_dim * kda.value_head_dim,
        "mla": per_key * keys,
        "dsa": per_key * min(dsa.top_k, keys) + 2 * dsa.num_heads * dsa.head_dim * keys,
    }
    return sum(of_kind[kind] for kind in cfg.attention_kinds())


def train_flops_per_token(
    parts: ModelParts, seq_len: int, trained: dict | None = None, image_patches: int = 0
) -> float:
    """Forward and backward: 6 FLOPs a weight (4 where it is frozen), 3 times the attention cores.

    Args:
      parts: the model.
      seq_len: length of a row.
      trained: for every parameter whether it gets a gradient; None = all do.
      image_patches: of a row, whose tower's work counts with its tokens.
    """
    weights, updated = matmul_params_per_token(parts), matmul_params_per_token(parts, trained)
    text = 4.0 * weights + 2.0 * updated + 3.0 * attention_flops_per_token(parts.cfg, seq_len)
    return text + tower_flops(parts, image_patches, trained).total / seq_len


class TowerFlops(NamedTuple):
    """FLOPs of the vision tower for a row, and the weights that a patch is multiplied with.

    Attributes:
      forward: maps and attention.
      backward: gradients of activations; none where nothing of the tower is trained.
      weights: gradients of the weights that are trained.
    """

    forward: float
    backward: float
    weights: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.weights


def tower_flops(parts: ModelParts, image_patches: int, trained: dict | None = None) -> TowerFlops:
    """What a row's images cost: its whole buffer, whatever is in it, as the devices run it.

    Attention is over the patches of one image, which are taken to be as many as it may have.

    Args:
      parts: the model.
      image_patches: of the buffer.
      trained: for every parameter whether it gets a gradient; None = all do.
    """
    vision = parts.cfg.vision
    if not vision.num_layers or not image_patches:
        return TowerFlops(0.0, 0.0, 0.0)
    all_maps, own_maps = _tower_maps(parts, None), _tower_maps(parts, trained)
    keys = min(image_patches, vision.max_patches)
    cores = 4.0 * vision.num_layers * vision.num_heads * vision.head_dim * keys
    forward = image_patches * (2.0 * all_maps + cores)
    if not own_maps:
        return TowerFlops(forward, 0.0, 0.0)
    backward = image_patches * (2.0 * all_maps + 2 * cores)
    return TowerFlops(forward, backward, image_patches * 2.0 * own_maps)


def _tower_maps(parts: ModelParts, chosen: dict | None) -> float:
    """Weights that a patch is multiplied with; those of the projector once for four patches."""
    total = 0.0
    infos, leaves = flat_infos(parts.infos), jax.tree.leaves(parts.params)
    counts = [True] * len(leaves) if chosen is None else jax.tree.leaves(chosen)
    for info, leaf, counted in zip(infos, leaves, counts, strict=True):
        is_map = info.name.startswith(_TOWER) and len(info.axes) >= 2 and info.name != _GRID
        if is_map and counted:
            share = MERGE**2 if ".projector." in info.name else 1
            total += num_values(info, leaf) / share
    return total
