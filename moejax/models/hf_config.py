"""`config.json` of a published checkpoint to a ModelConfig and back: tables, no code per family.

Every key of the file is either a field of ours, a value that must be one thing, or known to say
nothing about the computation; any other key is refused by name, since a part it stands for would
be missing silently. Source: architecture section 9.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from moejax.config import ConfigError, ModelConfig, build_section
from moejax.models import hf_keys
from moejax.models.hf_config_types import REALS, check_types
from moejax.models.hf_keys import Spelling
from moejax.models.hf_vision import read_vision

_ROPED = {"mla.rope": "interleaved", "mla.output_gate": "none"}
_KIMI = {"mla.output_gate": "none", "kda.gate": "softplus", "kda.output_gate": "low_rank"}


class Family(NamedTuple):
    """What a `model_type` says without a key of its own.

    Attributes:
      spelling: names of its tensors.
      style: which spelling of config keys it writes, "kimi" or "deepseek".
      full: attention kind of the layers that are not linear.
      defaults: model fields before the keys are read.
      nested: whether the language model stands in `text_config`.
    """

    spelling: Spelling
    style: str
    full: str
    defaults: Mapping[str, Any]
    nested: bool = False


FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(hf_keys.DEEPSEEK, "deepseek", "mla", _ROPED),
    "kimi_k2": Family(hf_keys.DEEPSEEK, "deepseek", "mla", _ROPED),
    "kimi_k25": Family(hf_keys.KIMI_K25, "deepseek", "mla", _ROPED, nested=True),
    "deepseek_v32": Family(hf_keys.DEEPSEEK, "deepseek", "dsa", _ROPED | {"dsa.rope": "half"}),
    "glm_moe_dsa": Family(
        hf_keys.DEEPSEEK, "deepseek", "dsa", _ROPED | {"dsa.rope": "interleaved"}
    ),
    "kimi_linear": Family(hf_keys.KIMI_LINEAR, "kimi", "mla", _KIMI),
    "kimi_k3": Family(hf_keys.KIMI_K3, "kimi", "mla", _KIMI, nested=True),
    "bailing_hybrid": Family(
        hf_keys.BAILING,
        "kimi",
        "mla",
        {
            "mla.rope": "interleaved",
            "mla.output_gate": "head",
            "kda.gate": "softplus",
            "kda.output_gate": "full",
            "kda.decay_rank": 0,
        },
    ),
}


class _Key(NamedTuple):
    """A key that is a number or flag of ours: its spellings, and the fields it sets."""

    kimi: str
    deepseek: str
    fields: tuple[str, ...]


def _key(kimi: str, fields: str, deepseek: str = "") -> _Key:
    return _Key(kimi, deepseek or kimi, tuple(fields.split()))


KEYS = (
    _key("vocab_size", "vocab_size"),
    _key("hidden_size", "dim"),
    _key("num_hidden_layers", "num_layers"),
    _key("rms_norm_eps", "norm_eps"),
    _key("initializer_range", "init_std"),
    _key("tie_word_embeddings", "tie_embeddings"),
    _key("intermediate_size", "ffn.dim"),
    _key("first_k_dense_replace", "ffn.num_dense_layers"),
    _key("num_attention_heads", "mla.num_heads"),
    _key("q_lora_rank", "mla.q_latent"),
    _key("kv_lora_rank", "mla.kv_latent"),
    _key("qk_nope_head_dim", "mla.nope_dim"),
    _key("qk_rope_head_dim", "mla.rope_dim"),
    _key("v_head_dim", "mla.value_dim"),
    _key("num_experts", "moe.num_experts", "n_routed_experts"),
    _key("num_experts_per_token", "moe.top_k", "num_experts_per_tok"),
    _key("num_shared_experts", "moe.num_shared", "n_shared_experts"),
    _key("moe_intermediate_size", "moe.expert_dim"),
    _key("routed_expert_hidden_size", "moe.latent_dim"),
    _key("latent_moe_use_norm", "moe.latent_norm"),
    _key("moe_router_activation_func", "moe.score", "scoring_func"),
    _key("moe_renormalize", "moe.renormalize", "norm_topk_prob"),
    _key("routed_scaling_factor", "moe.route_scale"),
    _key("num_expert_group", "moe.num_groups", "n_group"),
    _key("topk_group", "moe.top_groups"),
    _key("activation_situ_beta", "ffn.situ_beta"),
    _key("activation_situ_linear_beta", "ffn.situ_linear_beta"),
    _key("attn_res_block_size", "attn_res_block"),
    _key("index_n_heads", "dsa.num_heads"),
    _key("index_head_dim", "dsa.head_dim"),
    _key("index_topk", "dsa.top_k"),
    _key("linear_num_heads", "kda.num_heads"),
    _key("linear_head_dim", "kda.head_dim kda.value_head_dim"),
    _key("linear_conv_kernel_dim", "kda.conv_size"),
    _key("kda_lower_bound", "kda.gate_lower_bound"),
)
_LINEAR_KEYS = (
    _key("num_heads", "kda.num_heads"),
    _key("head_dim", "kda.head_dim kda.value_head_dim kda.decay_rank kda.output_gate_rank"),
    _key("short_conv_kernel_size", "kda.conv_size"),
    _key("gate_lower_bound", "kda.gate_lower_bound"),
)
# Released K3.1 files were not at hand: this spelling is ours, and only ours is read.
_DSA_KEYS = (
    _key("num_heads", "dsa.num_heads"),
    _key("head_dim", "dsa.head_dim"),
    _key("top_k", "dsa.top_k"),
)
ACTIVATIONS = {"silu": "swiglu", "situ": "situ"}
_LAYER_TYPES = {"linear_attention": "kda", "indexed_attention": "dsa"}

# Keys that the readers below take apart themselves.
_READ = (
    "hidden_act linear_attn_config dsa_config layer_types mla_use_nope mla_use_output_gate "
    "rope_theta rope_scaling rope_parameters rope_interleave num_local_experts use_grouped_topk "
    "short_conv_kernel_size mlp_layer_types indexer_types num_key_value_heads qk_head_dim"
).split()
# Keys about training, serving or the file itself.
_SILENT = (
    "architectures model_type dtype torch_dtype transformers_version auto_map use_cache "
    "bos_token_id eos_token_id pad_token_id max_position_embeddings model_max_length head_dim "
    "pretraining_tp ep_size output_router_logits num_nextn_predict_layers attention_dropout "
    "quantization_config layer_group_size seq_aux aux_loss_alpha router_aux_loss_coef "
    "mtp_loss_scaling_factor attn_implementation _attn_implementation_autoset _name_or_path "
    "return_dict output_attentions output_hidden_states id2label label2id is_encoder_decoder"
).split()
# Keys that stand for a part that we have in one form only.
_MUST_BE: Mapping[str, tuple] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1, None),
    "topk_method": ("noaux_tc", None),
    "kda_safe_gate": (True, None),
}
_KNOWN = {name for key in KEYS for name in key[:2]} | set(_READ) | set(_SILENT) | set(_MUST_BE)
_OUTER = set(_SILENT) | {
    "text_config", "vision_config", "tie_word_embeddings", "vocab_size",
    "media_placeholder_token_id", "image_token_id", "video_token_id",
    "vision_start_token_id", "vision_end_token_id",
    "projection_hidden_size", "projection_layer_norm_eps", "hidden_size", "initializer_range",
}  # fmt: skip


_COUNTS = {
    name for key in (*KEYS, *_LINEAR_KEYS, *_DSA_KEYS) for name in key[:2] if name not in REALS
} | {
    "num_local_experts", "short_conv_kernel_size", "num_key_value_heads", "max_position_embeddings",
    "original_max_position_embeddings", "num_nextn_predict_layers",
}  # fmt: skip


class UnsupportedError(ConfigError):
    """A model with a part that moejax does not have; `key` is the first that says so."""

    def __init__(self, key: str, value: Any, why: str, model_type: Any):
        self.key = key
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
        super().__init__(
            f"config.json (model_type {model_type!r}): key {key}={shown} is not supported: {why}. "
            f"Families that are: {', '.join(FAMILIES)}."
        )


def read_hf_config(raw: Mapping[str, Any], *, vision: bool = True) -> tuple[Family, ModelConfig]:
    """Family and model of a `config.json`.

    Args:
      raw: the parsed file.
      vision: with its vision tower, if it has one; without, the language model alone.
    Returns:
      The family, and the model with balancing and kernels at their defaults.
    Raises:
      UnsupportedError: the first key that stands for a part we do not have.
      ConfigError: a key that is missing, or values that contradict each other.
    """
    model_type = raw.get("model_type")
    inner = raw.get("text_config")
    text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else raw
    for section, known in ((text, _KNOWN), (raw, _OUTER if text is not raw else _KNOWN)):
        for key, value in section.items():
            if key not in known and value is not None:
                raise UnsupportedError(key, value, "no part of moejax answers to it", model_type)
    family = FAMILIES.get(str(model_type))
    if family is None or family.nested != (text is not raw):
        raise UnsupportedError("model_type", model_type, "an unknown family", model_type)
    check_types(text, _COUNTS)
    for key, allowed in _MUST_BE.items():
        if text.get(key) not in allowed:
            why = f"only {allowed[0]!r} is there"
            raise UnsupportedError(key, text[key], why, model_type)
    if text.get("num_key_value_heads", text.get("num_attention_heads")) != text.get(
        "num_attention_heads"
    ):
        raise UnsupportedError(
            "num_key_value_heads", text["num_key_value_heads"],
            "latent attention has as many key heads as query heads", model_type,
        )  # fmt: skip
    fields = dict(family.defaults) | {"name": str(model_type)}
    fields |= _take(text, KEYS) | _linear(text) | _gates(text) | _rope(text, family, model_type)
    fields |= _experts(text) | _layers(text, family, fields, model_type)
    if vision:
        tower = read_vision(raw, text["hidden_size"])
        fields |= {f"vision.{name}": value for name, value in tower.items()}
    return family, _model(fields)


def _take(section: Mapping[str, Any], keys: tuple[_Key, ...]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key in keys:
        for spelling in (key.kimi, key.deepseek):
            value = section.get(spelling)
            if value is not None:
                out |= {field: value for field in key.fields}
    return out


def _linear(text: Mapping[str, Any]) -> dict[str, Any]:
    """KDA fields: flat keys, or those of `linear_attn_config`."""
    section = text.get("linear_attn_config") or {}
    out = _take(section, _LINEAR_KEYS)
    if text.get("short_conv_kernel_size") is not None:
        out["kda.conv_size"] = text["short_conv_kernel_size"]
    if section.get("gate_lower_bound", text.get("kda_lower_bound")) is not None:
        out["kda.gate"] = "bounded"
    if section.get("use_full_rank_gate"):
        out["kda.output_gate"] = "full"
    return out


def _gates(text: Mapping[str, Any]) -> dict[str, Any]:
    out = _take(text.get("dsa_config") or {}, _DSA_KEYS)
    if text.get("mla_use_output_gate"):
        out["mla.output_gate"] = "elementwise"
    act = text.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise UnsupportedError(
            "hidden_act", act, f"only {', '.join(ACTIVATIONS)} are there", text.get("model_type")
        )
    out["ffn.activation"] = ACTIVATIONS[act]
    out["mla.q_latent"] = text.get("q_lora_rank") or 0
    if "index_n_heads" in text:
        out["dsa.k_norm_eps"] = 1e-6
    return out


def _experts(text: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"moe.balance": "bias_step"}
    if not text.get("routed_expert_hidden_size"):
        out |= {"moe.latent_dim": 0, "moe.latent_norm": False}
    if text.get("use_grouped_topk") is False:
        out |= {"moe.num_groups": 1, "moe.top_groups": 1}
    if text.get("num_local_experts") is not None:
        out["moe.num_experts"] = text["num_local_experts"]
    out["attn_res_block"] = text.get("attn_res_block_size") or 0
    return out


def _rope(text: Mapping[str, Any], family: Family, model_type: Any) -> dict[str, Any]:
    """Rotation of MLA; Kimi files without `mla_use_nope: false` rotate nothing."""
    rope = family.defaults.get("mla.rope")
    if family.style == "kimi" and rope is None:
        rope = "interleaved" if text.get("mla_use_nope") is False else "none"
    if rope == "none":
        return {"mla.rope": "none"}
    if text.get("rope_interleave") is False:
        rope = "half"
    section = text.get("rope_parameters") or text.get("rope_scaling") or {}
    name = "rope_parameters" if text.get("rope_parameters") else "rope_scaling"
    for key, value in section.items():
        if key not in _ROPE_KEYS and value is not None:
            raise UnsupportedError(f"{name}.{key}", value, "no rotation here has it", model_type)
    kind = section.get("rope_type", section.get("type", "default"))
    theta = section.get("rope_theta") or text.get("rope_theta") or 10000.0
    out = {"mla.rope": rope, "mla.rope_theta": float(theta)}
    if kind == "default":
        return out
    if kind != "yarn":
        raise UnsupportedError(f"{name}.rope_type", kind, "only default and yarn are", model_type)
    numbers = {
        "factor": "yarn_factor", "original_max_position_embeddings": "yarn_original_length",
        "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "mscale": "yarn_mscale",
        "mscale_all_dim": "yarn_mscale_all_dim",
    }  # fmt: skip
    section = dict(section)
    if section.get("original_max_position_embeddings") is None:
        section["original_max_position_embeddings"] = text.get("max_position_embeddings")
    for key in ("factor", "original_max_position_embeddings"):
        if section.get(key) is None:
            raise ConfigError(f"config.json: {name} of type yarn has no {key}.")
    return out | {
        f"mla.{ours}": section[key] for key, ours in numbers.items() if section.get(key) is not None
    }


_ROPE_KEYS = (
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim",
)  # fmt: skip


def num_mtp_layers(raw: Mapping[str, Any]) -> int:
    """Multi-token-prediction layers that a checkpoint may hold behind the model's own."""
    inner = raw.get("text_config")
    text = inner if isinstance(inner, Mapping) else raw
    return text.get("num_nextn_predict_layers") or 0


def _layers(
    text: Mapping[str, Any], family: Family, fields: Mapping[str, Any], model_type: Any
) -> dict[str, Any]:
    """Attention kind of every layer, and that dense layers come first."""
    num_layers, dense = fields.get("num_layers", 0), fields.get("ffn.num_dense_layers", 0)
    shared = [i for i, kind in enumerate(text.get("indexer_types") or ()) if kind != "full"]
    if shared:
        raise UnsupportedError(
            "indexer_types", text["indexer_types"], f"layer {shared[0]} has no indexer of its own",
            model_type,
        )  # fmt: skip
    mlps = text.get("mlp_layer_types") or ()
    if mlps and list(mlps) != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise UnsupportedError(
            "mlp_layer_types", mlps, "dense layers must be the first ones", model_type
        )
    linear, types = text.get("linear_attn_config") or {}, text.get("layer_types")
    if types:
        kinds = [_LAYER_TYPES.get(kind, family.full) for kind in types]
        odd = [t for t in types if t not in (*_LAYER_TYPES, "full_attention")]
        if odd:
            raise UnsupportedError("layer_types", odd[0], "no such attention is there", model_type)
    elif linear:
        kinds = _from_lists(linear, num_layers)
    elif "kda.gate" in family.defaults:
        raise ConfigError(
            "config.json has neither layer_types nor linear_attn_config: which layers are linear "
            "cannot be known. Take the config.json that belongs to the weights."
        )
    else:
        kinds = [family.full] * num_layers
    if len(kinds) != num_layers:
        raise ConfigError(
            f"config.json: {len(kinds)} entries in layer_types, num_hidden_layers={num_layers}."
        )
    for i in (text.get("dsa_config") or {}).get("layers", ()):
        kinds[i - 1] = "dsa"
    return _pattern(kinds)


def _from_lists(linear: Mapping[str, Any], num_layers: int) -> list[str]:
    """Kinds from the 1-based lists of `linear_attn_config`."""
    kda, full = (list(linear.get(key) or ()) for key in ("kda_layers", "full_attn_layers"))
    if sorted(kda + full) != list(range(1, num_layers + 1)):
        raise ConfigError(
            "config.json: linear_attn_config.kda_layers and full_attn_layers together must name "
            f"each of the layers 1 to {num_layers} once."
        )
    return ["kda" if i + 1 in set(kda) else "mla" for i in range(num_layers)]


def _pattern(kinds: list[str]) -> dict[str, Any]:
    """The shortest pattern that repeats to `kinds`, the last layer apart."""
    for period in range(1, len(kinds) + 1):
        if all(kinds[i] == kinds[i % period] for i in range(len(kinds) - 1)):
            break
    last = "" if kinds[-1] == kinds[(len(kinds) - 1) % period] else kinds[-1]
    return {"attention": ",".join(kinds[:period]), "last_attention": last}


def _model(fields: Mapping[str, Any]) -> ModelConfig:
    tree: dict[str, Any] = {}
    for name, value in fields.items():
        section, _, field = name.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[field] = value
    return build_section(ModelConfig, tree, "model.")
