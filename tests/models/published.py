"""Tiny checkpoints in the published formats (tests/fixtures/oracles) as moejax configs and weights.

Their weights are random; logits, router choices, selected keys, losses and gradients were computed
by transformers and mlx-lm, see tests/fixtures/oracles/README.md.
"""

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moejax.config import DsaConfig, FfnConfig, KdaConfig, MlaConfig, ModelConfig, MoeConfig

FOLDER = Path(__file__).parent.parent / "fixtures" / "oracles"
NAMES = ("k3_text", "kimi_linear", "deepseek_v32", "bailing_hybrid")


@functools.cache
def cases(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "cases.npz") as file:
        return dict(file)


def config(name: str) -> ModelConfig:
    """The moejax config of a checkpoint's config.json."""
    raw = json.loads((FOLDER / name / "config.json").read_text())
    c = raw.get("text_config", raw)
    first = lambda *keys, default=None: next((c[k] for k in keys if c.get(k) is not None), default)  # noqa: E731
    layers = c["num_hidden_layers"]
    if name == "deepseek_v32":
        kinds = ["dsa"] * layers
    else:
        types = c.get("layer_types")
        if types is None:
            types = [
                "linear_attention" if i + 1 in c["linear_attn_config"]["kda_layers"] else ""
                for i in range(layers)
            ]
        kinds = ["kda" if kind == "linear_attention" else "mla" for kind in types]
    linear = c.get("linear_attn_config") or {}
    bound = linear.get("gate_lower_bound", c.get("kda_lower_bound"))
    full_gate = bool(linear.get("use_full_rank_gate")) or name == "bailing_hybrid"
    rope = "interleaved" if name in ("deepseek_v32", "bailing_hybrid") else "none"
    kda = KdaConfig(
        num_heads=linear.get("num_heads", first("linear_num_heads", default=2)),
        head_dim=16,
        value_head_dim=16,
        gate="softplus" if bound is None else "bounded",
        gate_lower_bound=-5.0 if bound is None else bound,
        decay_rank=0 if name == "bailing_hybrid" else 16,
        output_gate="full" if full_gate else "low_rank",
        output_gate_rank=16,
    )
    mla = MlaConfig(
        num_heads=c["num_attention_heads"],
        q_latent=c["q_lora_rank"] or 0,
        kv_latent=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=c["qk_rope_head_dim"],
        value_dim=c["v_head_dim"],
        rope=rope,
        output_gate={"k3_text": "elementwise", "bailing_hybrid": "head"}.get(name, "none"),
    )
    dsa = DsaConfig(
        num_heads=first("index_n_heads", default=1),
        head_dim=first("index_head_dim", default=8),
        top_k=first("index_topk", default=1),
        rope="half" if rope != "none" else "none",
        k_norm_eps=1e-6,
        stage="frozen",
    )
    moe = MoeConfig(
        num_experts=first("num_experts", "n_routed_experts", "num_local_experts"),
        top_k=first("num_experts_per_token", "num_experts_per_tok"),
        expert_dim=c["moe_intermediate_size"],
        latent_dim=c.get("routed_expert_hidden_size") or 0,
        latent_norm=bool(c.get("latent_moe_use_norm")),
        num_shared=first("num_shared_experts", "n_shared_experts"),
        balance="none",
        num_groups=first("num_expert_group", "n_group"),
        top_groups=c["topk_group"],
        route_scale=c["routed_scaling_factor"],
    )
    situ = c["hidden_act"] == "situ"
    ffn = FfnConfig(
        num_dense_layers=1, dim=c["intermediate_size"], activation="situ" if situ else "swiglu"
    )
    return ModelConfig(
        name=name,
        vocab_size=c["vocab_size"],
        dim=c["hidden_size"],
        num_layers=layers,
        attention=",".join(kinds),
        last_attention="",
        attn_res_block=c.get("attn_res_block_size") or 0,
        norm_eps=c["rms_norm_eps"],
        kda=kda,
        mla=mla,
        dsa=dsa,
        ffn=ffn,
        moe=moe,
    )


_SPELLINGS = (
    ("language_model.", ""),
    (".block_sparse_moe.", ".mlp."),
    (".w1.", ".gate_proj."),
    (".w3.", ".up_proj."),
    (".w2.", ".down_proj."),
    (".attention.", ".self_attn."),
    (".dense.", ".o_proj."),
    (".word_embeddings", ".embed_tokens"),
    (".expert_bias", ".e_score_correction_bias"),
)


def weights(name: str, file: str = "model") -> dict:
    """A checkpoint's arrays, one nested dict a layer as moejax names them; "grads": its gradients.

    Tensors that have no gradient (the router's bias, the indexers) are zero there.
    """
    cfg = config(name)
    given = {}
    for key, value in load_file(FOLDER / name / f"{file}.safetensors").items():
        for old, new in _SPELLINGS:
            key = key.replace(old, new)
        given[key.removesuffix(".weight")] = value.astype(np.float64)
    out = {
        "embed": given["model.embed_tokens"],
        "head": given["lm_head"],
        "final_norm": given["model.norm"],
    }
    if cfg.attn_res_block:
        out["final_mix"] = _mix(given, "model.output_attn_res")
    kinds = zip(cfg.attention_kinds(), cfg.ffn_kinds(), strict=True)
    out["layers"] = [
        _layer(cfg, _below(given, f"model.layers.{i}."), *kind) for i, kind in enumerate(kinds)
    ]
    return out


def _below(arrays: dict, prefix: str) -> dict:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def _mix(g: dict, name: str) -> dict:
    norm = g[name + "_norm"] if name + "_norm" in g else np.zeros(g["input_layernorm"].shape)
    return {
        "query": g[name + "_proj"].reshape(-1) if name + "_proj" in g else np.zeros_like(norm),
        "norm": norm,
    }


def _layer(cfg: ModelConfig, g: dict, attention: str, ffn: str) -> dict:
    out = {
        "attn_norm": {"weight": g["input_layernorm"]},
        "ffn_norm": {"weight": g["post_attention_layernorm"]},
    }
    if cfg.attn_res_block:
        out["attn_mix"], out["ffn_mix"] = _mix(g, "self_attention_res"), _mix(g, "mlp_res")
    inner = _below(g, "self_attn.")
    out["attn"] = _kda(cfg, inner) if attention == "kda" else _mla(cfg, inner, attention)
    mlp = _below(g, "mlp.")
    out["ffn"] = _glu(mlp, "") if ffn == "dense" else _moe(cfg, mlp)
    return out


def _glu(g: dict, prefix: str) -> dict:
    gate_up = np.stack([g[prefix + "gate_proj"].T, g[prefix + "up_proj"].T], 1)
    return {"gate_up": gate_up, "down": g[prefix + "down_proj"].T}


def _heads(array: np.ndarray, num_heads: int) -> np.ndarray:
    """[N H, in] to [in, N, H]."""
    return array.reshape(num_heads, -1, array.shape[-1]).transpose(2, 0, 1)


def _kda(cfg: ModelConfig, g: dict) -> dict:
    N = cfg.kda.num_heads
    out = {c: _heads(g[c + "_proj"], N) for c in "qkv"}
    out |= {c + "_conv": g[c + "_conv1d"][:, 0].T.reshape(cfg.kda.conv_size, N, -1) for c in "qkv"}
    for ours, theirs in (("decay", "f"), ("gate", "g")):
        if theirs + "_proj" in g:
            out[ours] = g[theirs + "_proj"].T
        else:
            out[ours + "_a"], out[ours + "_b"] = g[theirs + "_a_proj"].T, g[theirs + "_b_proj"].T
    out["beta"], out["o"], out["o_norm"] = g["b_proj"].T, g["o_proj"].T, g["o_norm"]
    out["a_log"], out["dt_bias"] = g["A_log"].reshape(-1)[:N], g["dt_bias"].reshape(N, -1)
    return out


def _mla(cfg: ModelConfig, g: dict, kind: str) -> dict:
    c = cfg.mla
    kv = _heads(g["kv_b_proj"], c.num_heads)
    out = {
        "kv_a": g["kv_a_proj_with_mqa"].T,
        "kv_norm": {"weight": g["kv_a_layernorm"]},
        "o": g["o_proj"].T,
    }
    out["k_b"], out["v_b"] = kv[..., : c.nope_dim], kv[..., c.nope_dim :]
    if c.q_latent:
        out["q_a"], out["q_norm"] = g["q_a_proj"].T, {"weight": g["q_a_layernorm"]}
        out["q_b"] = _heads(g["q_b_proj"], c.num_heads)
    else:
        out["q"] = _heads(g["q_proj"], c.num_heads)
    if "g_proj" in g:
        out["gate"] = g["g_proj"].T
    if kind == "dsa":
        U, D = cfg.dsa, cfg.dim
        zeros = {
            "wq_b": np.zeros((U.num_heads * U.head_dim, c.q_latent)),
            "wk": np.zeros((U.head_dim, D)),
            "weights_proj": np.zeros((U.num_heads, D)),
            "k_norm": np.zeros(U.head_dim),
            "k_norm.bias": np.zeros(U.head_dim),
        }
        i = zeros | _below(g, "indexer.")
        out["indexer"] = {"q": i["wq_b"].T, "k": i["wk"].T, "weights": i["weights_proj"].T}
        out["indexer"] |= {"k_norm": i["k_norm"], "k_norm_bias": i["k_norm.bias"]}
    return out


def _moe(cfg: ModelConfig, g: dict) -> dict:
    experts = [_glu(g, f"experts.{e}.") for e in range(cfg.moe.num_experts)]
    bias = g.get("gate.e_score_correction_bias", np.zeros(cfg.moe.num_experts))
    out = {"router": {"weight": g["gate"].T, "bias": bias}, "shared": _glu(g, "shared_experts.")}
    out["experts"] = {k: np.stack([e[k] for e in experts]) for k in ("gate_up", "down")}
    if cfg.moe.latent_dim:
        out["latent_down"], out["latent_up"] = (
            g["routed_expert_down_proj"].T,
            g["routed_expert_up_proj"].T,
        )
        out["latent_norm"] = {"weight": g["routed_expert_norm"]}
    return out
