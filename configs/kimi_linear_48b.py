"""Kimi-Linear-48B-A3B: KDA with NoPE MLA every fourth layer, plain MoE, SwiGLU."""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.dim, m.num_layers, m.vocab_size, m.attn_res_block = (
        "kimi_linear_48b",
        2304,
        27,
        163840,
        0,
    )
    m.attention, m.last_attention = "kda,kda,kda,mla", "mla"
    m.kda.num_heads, m.kda.head_dim, m.kda.value_head_dim = 32, 128, 128
    m.kda.gate, m.kda.output_gate = "softplus", "low_rank"
    m.kda.decay_rank = m.kda.output_gate_rank = 128
    m.mla.num_heads, m.mla.q_latent, m.mla.kv_latent = 32, 0, 512
    m.mla.nope_dim, m.mla.rope_dim, m.mla.value_dim = 128, 64, 128
    m.mla.output_gate = "none"
    m.ffn.dim, m.ffn.activation = 9216, "swiglu"
    m.moe.num_experts, m.moe.top_k, m.moe.expert_dim = 256, 8, 1024
    m.moe.latent_dim, m.moe.latent_norm, m.moe.num_shared = 0, False, 1
    m.moe.route_scale = 2.446
    c.data.seq_len, c.data.batch_size = 4096, 1024
    c.data.tokenizer = "tiktoken.model"
    c.optim.lr, c.optim.adam_lr, c.optim.schedule, c.optim.qk_clip = 1.1e-3, 1.1e-3, "wsd", 100.0
    c.train.num_steps, c.train.compute_dtype, c.train.remat = 100_000, "bfloat16", "full"
    c.mesh.fsdp, c.mesh.expert = -1, 8
    c.checkpoint.every = c.eval.every = 1000
    return c
