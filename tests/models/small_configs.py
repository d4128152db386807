"""Small points of the family that, between them, turn every switch."""

from moejax.config import DsaConfig, FfnConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig


def small(
    attention: str,
    num_layers: int,
    *,
    kda: dict | None = None,
    mla: dict | None = None,
    dsa: dict | None = None,
    ffn: dict | None = None,
    moe: dict | None = None,
    **model,
) -> ModelConfig:
    """A model of width 32 with every size different from every other where the maths allows."""
    kda = {"num_heads": 2, "head_dim": 8, "value_head_dim": 12, "decay_rank": 6, "chunk": 16} | (
        kda or {}
    )
    mla = {"num_heads": 3, "q_latent": 20, "kv_latent": 14, "nope_dim": 8, "rope_dim": 4} | (
        {"value_dim": 10} | (mla or {})
    )
    dsa = {"num_heads": 2, "head_dim": 6, "top_k": 7} | (dsa or {})
    moe = {"num_experts": 8, "top_k": 3, "expert_dim": 10, "latent_dim": 16} | (moe or {})
    ffn = {"dim": 24} | (ffn or {})
    model = {"vocab_size": 50, "dim": 32, "last_attention": "", "attn_res_block": 2} | model
    return ModelConfig(
        attention=attention,
        num_layers=num_layers,
        kda=KdaConfig(**kda),
        mla=MlaConfig(**mla),
        dsa=DsaConfig(**dsa),
        ffn=FfnConfig(**ffn),
        moe=MoeConfig(**moe),
        **model,
    )


YARN = {"yarn_factor": 8.0, "yarn_original_length": 16, "yarn_beta_fast": 4.0}

CONFIGS = {
    # K3.1 in small: KDA and NoPE DSA, latent experts, AttnRes, a border inside the repeated group.
    "hybrid": small("kda,dsa", 5),
    # Rotated MLA, half-split pairs, YaRN with both magnitudes, softmax router, tied embeddings.
    "yarn": small(
        "mla",
        3,
        attn_res_block=0,
        tie_embeddings=True,
        mla={"rope": "half", "output_gate": "head", "yarn_mscale": 0.7}
        | YARN
        | {"yarn_mscale_all_dim": 1.3},
        ffn={"num_dense_layers": 0, "activation": "swiglu"},
        moe={"latent_dim": 0, "num_shared": 0, "score": "softmax", "renormalize": False}
        | {"route_scale": 2.5, "balance": "aux", "aux_weight": 0.1},
    ),
    # Interleaved pairs in MLA and indexer, warm-up stage, groups, biased combine weights.
    "warmup": small(
        "dsa",
        3,
        attn_res_block=2,
        mla={"rope": "interleaved", "output_gate": "none"} | YARN,
        dsa={"rope": "interleaved", "stage": "warmup"},
        moe={"num_groups": 4, "top_groups": 2, "weights_use_bias": True, "latent_norm": False},
    ),
    # Kimi-Linear's KDA in small, and a block at every layer.
    "softplus": small(
        "kda",
        3,
        attn_res_block=1,
        kda={"gate": "softplus", "decay_rank": 0, "output_gate": "low_rank"}
        | {"output_gate_rank": 5},
        moe={"latent_dim": 0, "balance": "bias_step"},
    ),
    # DeepSeek's mix of pairs; a block longer than the model; SiTU bounds that bite.
    "half": small(
        "dsa",
        2,
        attn_res_block=9,
        mla={"rope": "interleaved", "rope_dim": 4},
        dsa={"rope": "half", "top_k": 4},
        ffn={"situ_beta": 1.0, "situ_linear_beta": 2.0},
        moe={"balance": "none", "num_groups": 2, "top_groups": 1},
    ),
    # No query latent, no shared key dims, another tap count and bound, every expert chosen.
    "narrow": small(
        "kda,mla",
        2,
        mla={"q_latent": 0, "rope_dim": 0},
        kda={"conv_size": 3, "gate_lower_bound": -2.0},
        ffn={"num_dense_layers": 0},
        moe={"num_experts": 4, "top_k": 4, "route_scale": 1.7},
    ),
}
