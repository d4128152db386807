"""Model FLOPs of a training token: what the maths needs, not what remat or padding adds."""

from __future__ import annotations

import jax

from moejax.config import ModelConfig
from moejax.models.parts import ModelParts, flat_infos, num_values


def matmul_params_per_token(parts: ModelParts, chosen: dict | None = None) -> int:
    """Weights that one token is multiplied with.

    All maps and the head; of the experts only those the token uses.

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


def train_flops_per_token(parts: ModelParts, seq_len: int, trained: dict | None = None) -> float:
    """Forward and backward: 6 FLOPs a weight (4 where it is frozen), 3 times the attention cores.

    Args:
      parts: the model.
      seq_len: length of a row.
      trained: for every parameter whether it gets a gradient; None = all do.
    """
    weights, updated = matmul_params_per_token(parts), matmul_params_per_token(parts, trained)
    return 4.0 * weights + 2.0 * updated + 3.0 * attention_flops_per_token(parts.cfg, seq_len)
