"""What kind of value each key of a published config.json holds, checked before it is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from moejax.config import ConfigError

# More than any model has; a larger number is damage, and lists of that length would be made.
MAX_LAYERS, MAX_SIZE = 10_000, 10**9

SECTIONS = ("linear_attn_config", "dsa_config", "rope_scaling", "rope_parameters")
LISTS = ("layer_types", "mlp_layer_types", "indexer_types")
INNER_LISTS = ("kda_layers", "full_attn_layers", "layers")
FLAGS = (
    "mla_use_nope", "mla_use_output_gate", "rope_interleave", "use_grouped_topk",
    "use_full_rank_gate", "latent_moe_use_norm", "moe_renormalize", "norm_topk_prob",
    "tie_word_embeddings",
)  # fmt: skip
WORDS = ("hidden_act", "moe_router_activation_func", "scoring_func", "rope_type", "type")
REALS = (
    "rms_norm_eps", "initializer_range", "routed_scaling_factor", "activation_situ_beta",
    "activation_situ_linear_beta", "gate_lower_bound", "kda_lower_bound", "rope_theta", "factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip
REQUIRED = (
    ("vocab_size",), ("hidden_size",), ("num_hidden_layers",), ("rms_norm_eps",),
    ("intermediate_size",), ("first_k_dense_replace",), ("num_attention_heads",),
    ("kv_lora_rank",), ("qk_nope_head_dim",), ("qk_rope_head_dim",), ("v_head_dim",),
    ("num_experts", "n_routed_experts", "num_local_experts"),
    ("num_experts_per_token", "num_experts_per_tok"), ("moe_intermediate_size",),
    ("routed_scaling_factor",), ("num_shared_experts", "n_shared_experts"),
)  # fmt: skip


def check_types(text: Mapping[str, Any], counts: Iterable[str]) -> None:
    """Raises ConfigError naming the first key whose value is of the wrong kind, or missing.

    Args:
      text: the section of the language model.
      counts: keys that hold whole numbers.
    """
    for names in REQUIRED:
        if all(text.get(name) is None for name in names):
            raise ConfigError(f"config.json: key {' or '.join(names)} is missing.")
    _check_section(text, "", frozenset(counts))


def _check_section(section: Mapping[str, Any], prefix: str, counts: frozenset[str]) -> None:
    for key, value in section.items():
        name = prefix + key
        if value is None:
            continue
        if key in SECTIONS and not prefix:
            _need(isinstance(value, Mapping), name, value, "an object")
            _check_section(value, f"{name}.", counts)
        elif key in LISTS:
            words = isinstance(value, list) and all(isinstance(v, str) for v in value)
            _need(words, name, value, "a list of words")
        elif key in INNER_LISTS:
            numbers = isinstance(value, list) and all(type(v) is int for v in value)
            _need(numbers, name, value, "a list of whole numbers")
        elif key in FLAGS:
            _need(isinstance(value, bool), name, value, "true or false")
        elif key in WORDS:
            _need(isinstance(value, str), name, value, "a word")
        elif key in REALS:
            real = isinstance(value, int | float) and not isinstance(value, bool)
            _need(real and abs(value) < 1e30 and math.isfinite(value), name, value, "a number")
        elif key in counts:
            most = MAX_LAYERS if key in ("num_hidden_layers", "first_k_dense_replace") else MAX_SIZE
            least = 1 if key == "num_hidden_layers" else 0
            fits = type(value) is int and least <= value <= most
            _need(fits, name, value, f"a whole number, {least} to {most}")


def _need(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        raise ConfigError(f"config.json: {name}={shown} is not allowed: it must be {what}.")
