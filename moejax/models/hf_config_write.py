"""`config.json` in a published format for a model of ours; refused where no format can hold it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.config import ConfigError, ModelConfig
from moejax.models.hf_config import ACTIVATIONS, FAMILIES, KEYS, read_hf_config
from moejax.models.hf_vision import write_vision


def family_name(cfg: ModelConfig) -> str:
    """The `model_type` whose format can hold a model."""
    kinds = set(cfg.attention_kinds())
    if cfg.attn_res_block or cfg.moe.latent_dim or cfg.ffn.activation == "situ":
        return "kimi_k3"
    if "kda" in kinds:
        return "kimi_k3" if cfg.vision.num_layers else "kimi_linear"
    if cfg.vision.num_layers and "dsa" not in kinds:
        return "kimi_k25"
    return "deepseek_v32" if "dsa" in kinds else "deepseek_v3"


def write_hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """`config.json` of a model in the format of the family that fits.

    Raises:
      ConfigError: names the field that no published format can hold.
    """
    model_type = family_name(cfg)
    family = FAMILIES[model_type]
    flat = _flat(cfg)
    skip = "index_ linear_ kda_" if family.style == "kimi" else "linear_ kda_ activation_ attn_res"
    text: dict[str, Any] = {"model_type": _TEXT_TYPES.get(model_type, model_type)}
    for key in KEYS:
        name = key.kimi if family.style == "kimi" else key.deepseek
        if not name.startswith(tuple(skip.split())) and name not in _ABSENT.get(model_type, ()):
            text[name] = flat[key.fields[0]]
    if "dsa" not in cfg.attention_kinds():
        text = {k: v for k, v in text.items() if not k.startswith("index_")}
    text |= {"hidden_act": {v: k for k, v in ACTIVATIONS.items()}[cfg.ffn.activation]}
    text |= {"q_lora_rank": cfg.mla.q_latent or None, "num_key_value_heads": cfg.mla.num_heads}
    text |= _write_kimi(cfg) if family.style == "kimi" else _write_rope(cfg)
    raw = text
    if family.nested:
        raw = {"model_type": model_type, "tie_word_embeddings": cfg.tie_embeddings}
        raw |= {"architectures": [_ARCHITECTURES[model_type]], "text_config": text}
        raw |= write_vision(cfg)
    else:
        raw["architectures"] = [_ARCHITECTURES[model_type]]
    _check_round_trip(cfg, raw)
    return raw


_TEXT_TYPES = {"kimi_k3": "kimi_linear", "kimi_k25": "deepseek_v3"}
_ARCHITECTURES = {
    "kimi_k3": "KimiK3ForConditionalGeneration",
    "kimi_k25": "Kimi_K25ForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
}
_K3_ONLY = (
    "routed_expert_hidden_size", "latent_moe_use_norm", "activation_situ_beta",
    "activation_situ_linear_beta", "attn_res_block_size",
)  # fmt: skip
_ABSENT = {name: _K3_ONLY for name in ("kimi_linear", "deepseek_v3", "deepseek_v32", "kimi_k25")}


def _write_kimi(cfg: ModelConfig) -> dict[str, Any]:
    kinds = list(enumerate(cfg.attention_kinds(), 1))
    linear: dict[str, Any] = {
        "num_heads": cfg.kda.num_heads,
        "head_dim": cfg.kda.head_dim,
        "short_conv_kernel_size": cfg.kda.conv_size,
        "kda_layers": [i for i, kind in kinds if kind == "kda"],
        "full_attn_layers": [i for i, kind in kinds if kind != "kda"],
    }
    if cfg.kda.output_gate == "full":
        linear["use_full_rank_gate"] = True
    if cfg.kda.gate == "bounded":
        linear["gate_lower_bound"] = cfg.kda.gate_lower_bound
    out: dict[str, Any] = {
        "linear_attn_config": linear,
        "mla_use_nope": cfg.mla.rope == "none",
        "use_grouped_topk": True,
    }
    if cfg.mla.output_gate == "elementwise":
        out["mla_use_output_gate"] = True
    if cfg.mla.rope != "none":
        out |= _write_rope(cfg)
    indexed = [i for i, kind in kinds if kind == "dsa"]
    if indexed:
        out["dsa_config"] = {
            "num_heads": cfg.dsa.num_heads, "head_dim": cfg.dsa.head_dim, "top_k": cfg.dsa.top_k,
            "layers": indexed,
        }  # fmt: skip
    return out


def _write_rope(cfg: ModelConfig) -> dict[str, Any]:
    m = cfg.mla
    out: dict[str, Any] = {"rope_theta": m.rope_theta, "rope_scaling": None}
    if m.yarn_factor != 1.0:
        out["rope_scaling"] = {
            "type": "yarn", "factor": m.yarn_factor,
            "original_max_position_embeddings": m.yarn_original_length,
            "beta_fast": m.yarn_beta_fast, "beta_slow": m.yarn_beta_slow,
            "mscale": m.yarn_mscale, "mscale_all_dim": m.yarn_mscale_all_dim,
        }  # fmt: skip
    return out


# Fields that say how a model is trained or run, not what it computes.
_NOT_WRITTEN = (
    "name", "dropout", "attention", "last_attention", "kda.chunk", "mla.latent_eps",
    "dsa.stage", "dsa.kl_weight", "dsa.k_norm_eps", "moe.balance", "moe.bias_rate",
    "moe.aux_weight", "moe.exchange", "moe.exchange_slices", "moe.exchange_level",
    "moe.exchange_hosts", "moe.buffer_factor", "moe.receive_factor", "moe.capacity_factor",
    "moe.expert_format", "vision.max_patches", "vision.max_side",
)  # fmt: skip


def first_difference(cfg: ModelConfig, other: ModelConfig) -> str:
    """The first field in which two models compute differently, empty when none is."""
    if cfg.attention_kinds() != other.attention_kinds():
        return "attention"
    theirs, used = _flat(other), _sections_used(cfg)
    for name, value in _flat(cfg).items():
        silent = name in _NOT_WRITTEN or not used.get(name.partition(".")[0], True)
        if not silent and value != theirs[name] and not _unused(cfg, name):
            return name
    return ""


def _check_round_trip(cfg: ModelConfig, raw: Mapping[str, Any]) -> None:
    """Raises ConfigError when reading `raw` back would give another model."""
    _, again = read_hf_config(raw)
    name = first_difference(cfg, again)
    if name:
        raise ConfigError(
            f"model.{name}={_flat(cfg)[name]!r} cannot be written in the {raw['model_type']} "
            f"format: it would be read back as {_flat(again)[name]!r}."
        )


def _sections_used(cfg: ModelConfig) -> dict[str, bool]:
    kinds = set(cfg.attention_kinds())
    attention = {"kda": "kda" in kinds, "dsa": "dsa" in kinds, "mla": bool(kinds - {"kda"})}
    return attention | {"vision": cfg.vision.num_layers > 0}


def _unused(cfg: ModelConfig, name: str) -> bool:
    """Whether a field has no say under the values of others."""
    return {
        "kda.gate_lower_bound": cfg.kda.gate == "softplus",
        "kda.output_gate_rank": cfg.kda.output_gate == "full",
        "ffn.situ_beta": cfg.ffn.activation != "situ",
        "ffn.situ_linear_beta": cfg.ffn.activation != "situ",
        "moe.latent_norm": not cfg.moe.latent_dim,
        "mla.rope_theta": cfg.mla.rope == "none",
        "dsa.rope": cfg.mla.rope == "none" and cfg.dsa.rope == "none",
    }.get(name, name.startswith("mla.yarn") and cfg.mla.yarn_factor == 1.0)


def _flat(cfg: Any, prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cfg):
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            out |= _flat(value, f"{prefix}{field.name}.")
        else:
            out[prefix + field.name] = value
    return out
