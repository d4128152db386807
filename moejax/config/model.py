"""Config sections that say what the model is; one point of the family per value."""

from __future__ import annotations

import dataclasses

from moejax.config.fields import ConfigError, Section, setting
from moejax.config.vision import VisionConfig

ATTENTION_KINDS = ("kda", "mla", "dsa")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaConfig(Section):
    """Kimi Delta Attention layers."""

    _path = "model.kda."
    num_heads: int = setting(4, ge=1)
    head_dim: int = setting(16, ge=1, le=256)
    value_head_dim: int = setting(16, ge=1)
    conv_size: int = setting(4, ge=1, le=16)
    gate: str = setting("bounded", choices=("bounded", "softplus"))
    gate_lower_bound: float = setting(-5.0, ge=-5.0, lt=0.0)
    decay_rank: int = setting(16, ge=0)
    output_gate: str = setting("full", choices=("full", "low_rank"))
    output_gate_rank: int = setting(16, ge=1)
    chunk: int = setting(64, ge=1, le=256)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk & (self.chunk - 1):
            below = 1 << (self.chunk.bit_length() - 1)
            raise ConfigError(
                f"model.kda.chunk={self.chunk} is no power of two. Use {below} or {2 * below}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaConfig(Section):
    """Multi-head latent attention; also the main attention of DSA layers."""

    _path = "model.mla."
    num_heads: int = setting(4, ge=1)
    q_latent: int = setting(32, ge=0)
    kv_latent: int = setting(16, ge=1)
    nope_dim: int = setting(16, ge=1)
    rope_dim: int = setting(8, ge=0)
    value_dim: int = setting(16, ge=1)
    latent_eps: float = setting(1e-6, gt=0.0)
    output_gate: str = setting("elementwise", choices=("none", "elementwise", "head"))
    rope: str = setting("none", choices=("none", "interleaved", "half"))
    rope_theta: float = setting(10000.0, gt=1.0)
    yarn_factor: float = setting(1.0, ge=1.0)
    yarn_original_length: int = setting(4096, ge=1)
    yarn_beta_fast: float = setting(32.0, gt=0.0)
    yarn_beta_slow: float = setting(1.0, gt=0.0)
    yarn_mscale: float = setting(1.0, ge=0.0)
    yarn_mscale_all_dim: float = setting(0.0, ge=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope != "none" and self.rope_dim % 2:
            raise ConfigError(
                f"model.mla.rope_dim={self.rope_dim} is odd; rotation needs pairs. Make it even."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DsaConfig(Section):
    """The lightning indexer of DSA layers and how it is trained."""

    _path = "model.dsa."
    num_heads: int = setting(4, ge=1)
    head_dim: int = setting(16, ge=1)
    top_k: int = setting(8, ge=1)
    rope: str = setting("none", choices=("none", "interleaved", "half"))
    k_norm_eps: float = setting(1e-5, gt=0.0)
    stage: str = setting("sparse", choices=("warmup", "sparse", "frozen"))
    kl_weight: float = setting(1.0, ge=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FfnConfig(Section):
    """Dense feed-forward layers, and the activation that every feed-forward part uses."""

    _path = "model.ffn."
    num_dense_layers: int = setting(1, ge=0)
    dim: int = setting(128, ge=1)
    activation: str = setting("situ", choices=("situ", "swiglu"))
    situ_beta: float = setting(4.0, gt=0.0)
    situ_linear_beta: float = setting(25.0, gt=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig(Section):
    """Mixture-of-experts layers: shape, router, balancing, exchange."""

    _path = "model.moe."
    num_experts: int = setting(16, ge=1)
    top_k: int = setting(4, ge=1)
    expert_dim: int = setting(32, ge=1)
    expert_format: str = setting("plain", choices=("plain", "mxfp4"))
    latent_dim: int = setting(32, ge=0)
    latent_norm: bool = setting(True)
    num_shared: int = setting(2, ge=0)
    score: str = setting("sigmoid", choices=("sigmoid", "softmax"))
    num_groups: int = setting(1, ge=1)
    top_groups: int = setting(1, ge=1)
    renormalize: bool = setting(True)
    route_scale: float = setting(1.0, gt=0.0)
    weights_use_bias: bool = setting(False)
    balance: str = setting("quantile", choices=("quantile", "bias_step", "aux", "none"))
    bias_rate: float = setting(1e-3, ge=0.0)
    aux_weight: float = setting(0.0, ge=0.0)
    exchange: str = setting("auto", choices=("auto", "local", "padded", "ragged"))
    exchange_slices: int = setting(1, ge=1)
    exchange_level: str = setting("expert", choices=("expert", "device", "host"))
    exchange_hosts: int = setting(0, ge=0)
    buffer_factor: float = setting(1.5, gt=0.0)
    receive_factor: float = setting(1.25, gt=0.0)
    capacity_factor: float = setting(0.0, ge=0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"model.moe.top_k={self.top_k} is more than "
                f"model.moe.num_experts={self.num_experts}. Lower top_k or add experts."
            )
        if self.balance == "aux" and not self.aux_weight:
            raise ConfigError(
                "model.moe.balance='aux' does nothing while model.moe.aux_weight=0. "
                "Set aux_weight, or balance='none'."
            )
        if self.num_experts % self.num_groups or self.top_groups > self.num_groups:
            raise ConfigError(
                f"model.moe.num_groups={self.num_groups}, top_groups={self.top_groups} do not fit "
                f"num_experts={self.num_experts}: groups must divide experts, and top_groups be at "
                "most num_groups."
            )
        if self.num_groups > 1:
            open_experts = self.top_groups * (self.num_experts // self.num_groups)
            if self.top_k > open_experts:
                raise ConfigError(
                    f"model.moe.top_k={self.top_k} is more than the {open_experts} experts in "
                    f"top_groups={self.top_groups} groups. Raise top_groups or lower top_k."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """The decoder."""

    _path = "model."
    name: str = setting("tiny")
    vocab_size: int = setting(512, ge=2)
    dim: int = setting(64, ge=1)
    num_layers: int = setting(9, ge=1)
    attention: str = setting("kda,kda,kda,dsa")
    last_attention: str = setting("dsa", choices=("", *ATTENTION_KINDS))
    attn_res_block: int = setting(3, ge=0)
    norm_eps: float = setting(1e-5, gt=0.0)
    init_std: float = setting(0.02, gt=0.0)
    tie_embeddings: bool = setting(False)
    dropout: float = setting(0.0, ge=0.0, lt=1.0)
    kda: KdaConfig = dataclasses.field(default_factory=KdaConfig)
    mla: MlaConfig = dataclasses.field(default_factory=MlaConfig)
    dsa: DsaConfig = dataclasses.field(default_factory=DsaConfig)
    ffn: FfnConfig = dataclasses.field(default_factory=FfnConfig)
    moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = self.attention.replace(" ", "").split(",")
        wrong = sorted(set(kinds) - set(ATTENTION_KINDS))
        if wrong:
            raise ConfigError(
                f"model.attention={self.attention!r} names {wrong}; it is a comma-separated "
                f"pattern of {', '.join(ATTENTION_KINDS)}, repeated over the layers."
            )
        if self.vision.num_layers and self.vision.pad_token >= self.vocab_size:
            raise ConfigError(
                f"model.vision.pad_token={self.vision.pad_token} is not below "
                f"model.vocab_size={self.vocab_size}. Name a token that the embedding holds."
            )
        width = self.moe.latent_dim or self.dim
        if self.moe.expert_format == "mxfp4" and (width % 32 or self.moe.expert_dim % 32):
            raise ConfigError(
                f"model.moe.expert_format='mxfp4' packs blocks of 32, which do not divide experts "
                f"of {width} x {self.moe.expert_dim}. Use multiples of 32, or the format 'plain'."
            )

    def attention_kinds(self) -> tuple[str, ...]:
        """Attention kind of each layer: the pattern repeated, the last as `last_attention` says."""
        pattern = self.attention.replace(" ", "").split(",")
        kinds = [pattern[i % len(pattern)] for i in range(self.num_layers)]
        if self.last_attention:
            kinds[-1] = self.last_attention
        return tuple(kinds)

    def ffn_kinds(self) -> tuple[str, ...]:
        """Feed-forward kind of each layer: `dense` first, then `moe`."""
        return tuple(
            "dense" if i < self.ffn.num_dense_layers else "moe" for i in range(self.num_layers)
        )
