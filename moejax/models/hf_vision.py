"""`vision_config` of a published `config.json` to a VisionConfig and back.

Three spellings are read: K3's and K2.5's own, which differ in a few keys, and that of transformers
for K2.5. As with the language model, a key that says something we do not have is refused by name.
Source: architecture section 8.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moejax.config import ConfigError, ModelConfig
from moejax.config.vision import MERGE

# Ours: the same number under the names that files use.
_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "dim": ("vt_hidden_size", "hidden_size"),
    "num_layers": ("vt_num_hidden_layers", "num_hidden_layers"),
    "num_heads": ("vt_num_attention_heads", "num_attention_heads"),
    "mlp_dim": ("vt_intermediate_size", "intermediate_size"),
    "patch": ("patch_size",),
    "grid": ("init_pos_emb_height", "pos_emb_height"),
    "max_frames": ("init_pos_emb_time", "pos_emb_time"),
}
# What a file leaves out is the first value; others are refused.
_MUST_BE: Mapping[str, tuple] = {
    "merge_kernel_size": ([MERGE, MERGE],),
    "merge_type": ("sd2_tpool",),
    "mlp_type": ("mlp2",),
    "activation_func": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "projector_hidden_act": ("gelu",),
    "pos_emb_type": ("divided_fixed",),
    "rope_theta": (10000.0,),
    "rope_type": ("axial", "default"),
    "video_attn_type": ("spatial_temporal",),
    "use_deterministic_attn": (False,),
}
_READ = (
    "init_pos_emb_width pos_emb_width qkv_hidden_size norm_type attn_bias linear_bias "
    "patch_embed_proj_bias pos_emb_interpolation_mode mm_projector_type projector_ln_eps "
    "mm_hidden_size text_hidden_size rope_parameters"
).split()
_SILENT = "model_type dtype torch_dtype transformers_version _attn_implementation".split()
_KNOWN = {name for names in _NUMBERS.values() for name in names} | {*_MUST_BE, *_READ, *_SILENT}
_PROJECTORS = {"patchmerger": "before", "patchmergerv2": "after"}
_CHOICES = {
    "mm_projector_type": tuple(_PROJECTORS),
    "norm_type": ("rmsnorm", "layernorm"),
    "pos_emb_interpolation_mode": ("bilinear", "bicubic"),
}


def read_vision(raw: Mapping[str, Any], text_dim: int) -> dict[str, Any]:
    """Fields of `model.vision` from a whole `config.json`; none where it has no `vision_config`.

    Args:
      raw: the parsed file.
      text_dim: width of the language model.
    Raises:
      ConfigError: the first key that is unknown, missing, or has a value that is not ours.
    """
    section = raw.get("vision_config")
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise _refused("vision_config", section, "it must be an object")
    _check_known(section)
    is_k3 = section.get("mm_projector_type") == "patchmergerv2"
    found = {ours: _number(section, names) for ours, names in _NUMBERS.items()}
    _check_widths(section, found, text_dim)
    width = section.get("qkv_hidden_size") or found["dim"]
    eps = section.get("projector_ln_eps", raw.get("projection_layer_norm_eps", 1e-5))
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise _refused("projector_ln_eps", eps, "it must be a number between 0 and 1")
    layer_norm = section.get("norm_type", "rmsnorm" if is_k3 else "layernorm") == "layernorm"
    return found | {
        "head_dim": width // found["num_heads"],
        "grid_resize": section.get(
            "pos_emb_interpolation_mode", "bilinear" if is_k3 else "bicubic"
        ),
        "norm": "layer" if layer_norm else "rms",
        "norm_eps": 1e-5 if layer_norm else 2.0**-23,
        "biases": _one_bias(section, not is_k3),
        "projector_norm": "after" if is_k3 else "before",
        "projector_eps": eps,
        "pad_token": raw.get("media_placeholder_token_id") or raw.get("image_token_id") or 0,
    }


def write_vision(cfg: ModelConfig) -> dict[str, Any]:
    """The keys of `config.json` for a model's tower, in K3's spelling; none without a tower."""
    v = cfg.vision
    if not v.num_layers:
        return {}
    section: dict[str, Any] = {names[0]: getattr(v, ours) for ours, names in _NUMBERS.items()}
    section |= {
        "activation_func": "gelu_pytorch_tanh", "attn_bias": v.biases, "linear_bias": v.biases,
        "patch_embed_proj_bias": v.biases, "init_pos_emb_width": v.grid,
        "merge_kernel_size": [MERGE, MERGE], "merge_type": "sd2_tpool", "mlp_type": "mlp2",
        "mm_hidden_size": v.dim, "norm_type": "rmsnorm" if v.norm == "rms" else "layernorm",
        "mm_projector_type": {at: name for name, at in _PROJECTORS.items()}[v.projector_norm],
        "pos_emb_interpolation_mode": v.grid_resize, "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu", "projector_ln_eps": v.projector_eps,
        "qkv_hidden_size": v.num_heads * v.head_dim, "text_hidden_size": cfg.dim,
    }  # fmt: skip
    return {"vision_config": section, "media_placeholder_token_id": v.pad_token}


def _check_known(section: Mapping[str, Any]) -> None:
    rope = section.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise _refused("rope_parameters", rope, "it must be an object")
    flat = {**section, **rope}
    for key, value in flat.items():
        if key not in _KNOWN and value is not None:
            raise _refused(key, value, "no part of the tower answers to it")
        allowed = _MUST_BE.get(key)
        if allowed and value is not None and value not in allowed:
            raise _refused(key, value, f"only {allowed[0]!r} is there")
    for key, known in _CHOICES.items():
        if section.get(key) not in (None, *known):
            raise _refused(key, section[key], f"only {', '.join(known)} are there")


def _number(section: Mapping[str, Any], names: tuple[str, ...]) -> int:
    value = next((section[name] for name in names if section.get(name) is not None), None)
    if value is None:
        raise ConfigError(f"config.json: key vision_config.{' or '.join(names)} is missing.")
    if type(value) is not int or not 1 <= value <= 10**6:
        raise _refused(names[0], value, "it must be a whole number, 1 to 1000000")
    return value


def _check_widths(section: Mapping[str, Any], found: Mapping[str, int], text_dim: int) -> None:
    """Widths that could differ in principle, and do not in ours."""
    for key, value in (
        ("init_pos_emb_width", found["grid"]), ("pos_emb_width", found["grid"]),
        ("mm_hidden_size", found["dim"]), ("text_hidden_size", text_dim),
    ):  # fmt: skip
        if section.get(key, value) != value:
            raise _refused(key, section[key], f"{value} is expected")
    width = section.get("qkv_hidden_size") or found["dim"]
    if type(width) is not int or width % (4 * found["num_heads"]):
        raise _refused("qkv_hidden_size", width, "4 x heads must divide the width of queries")


def _one_bias(section: Mapping[str, Any], default: bool) -> bool:
    flags = {section.get(k, default) for k in ("attn_bias", "linear_bias", "patch_embed_proj_bias")}
    if len(flags) > 1:
        raise _refused("attn_bias", section.get("attn_bias"), "maps have biases all or none")
    return bool(flags.pop())


def _refused(key: str, value: Any, why: str) -> ConfigError:
    shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    return ConfigError(
        f"config.json: key vision_config.{key}={shown} is not supported: {why}. To take the "
        "language model alone: --allow=vision_tower."
    )
