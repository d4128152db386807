"""Kimi K3, 2.78 T parameters, 104 B active: KDA, gated MLA every fourth layer, Stable LatentMoE."""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.dim, m.num_layers, m.vocab_size, m.attn_res_block = "kimi_k3", 7168, 93, 163840, 12
    m.attention, m.last_attention = "kda,kda,kda,mla", "mla"
    m.kda.num_heads, m.kda.head_dim, m.kda.value_head_dim = 96, 128, 128
    m.kda.decay_rank = m.kda.output_gate_rank = 128
    m.mla.num_heads, m.mla.q_latent, m.mla.kv_latent = 96, 1536, 512
    m.mla.nope_dim, m.mla.rope_dim, m.mla.value_dim = 128, 64, 128
    m.ffn.dim = 33792
    m.moe.num_experts, m.moe.top_k, m.moe.expert_dim, m.moe.latent_dim = 896, 16, 3072, 3584
    c.data.seq_len, c.data.batch_size = 4096, 1024
    c.data.tokenizer = "tiktoken.model"
    c.optim.lr, c.optim.adam_lr, c.optim.qk_clip = 3e-4, 3e-4, 100.0
    c.optim.warmup_fraction = 0.01
    c.train.num_steps, c.train.compute_dtype, c.train.remat = 100_000, "bfloat16", "full"
    c.mesh.fsdp, c.mesh.expert = -1, 64
    c.checkpoint.every = c.eval.every = 1000
    c.log.loads_every = 100  # a line is 0.27 MB
    return c
