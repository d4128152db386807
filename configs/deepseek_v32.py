"""DeepSeek-V3.2: MLA with rotary positions, an indexer in every layer, group-limited routing."""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.dim, m.num_layers, m.vocab_size, m.attn_res_block = (
        "deepseek_v32",
        7168,
        61,
        129280,
        0,
    )
    m.attention, m.last_attention, m.norm_eps = "dsa", "", 1e-6
    m.mla.num_heads, m.mla.q_latent, m.mla.kv_latent = 128, 1536, 512
    m.mla.nope_dim, m.mla.rope_dim, m.mla.value_dim = 128, 64, 128
    m.mla.output_gate, m.mla.rope = "none", "interleaved"
    m.mla.yarn_factor, m.mla.yarn_original_length, m.mla.yarn_mscale_all_dim = 40.0, 4096, 1.0
    m.dsa.num_heads, m.dsa.head_dim, m.dsa.top_k = 64, 128, 2048
    m.dsa.rope, m.dsa.k_norm_eps = "half", 1e-6
    m.ffn.num_dense_layers, m.ffn.dim, m.ffn.activation = 3, 18432, "swiglu"
    m.moe.num_experts, m.moe.top_k, m.moe.expert_dim = 256, 8, 2048
    m.moe.latent_dim, m.moe.latent_norm, m.moe.num_shared = 0, False, 1
    m.moe.num_groups, m.moe.top_groups, m.moe.route_scale = 8, 4, 2.5
    m.moe.balance, m.moe.aux_weight = "bias_step", 1e-4
    c.data.seq_len, c.data.batch_size = 4096, 1024
    c.data.tokenizer = "tokenizer.json"
    c.optim.name, c.optim.lr = "adamw", 7.3e-6
    c.train.num_steps, c.train.compute_dtype, c.train.remat = 15_000, "bfloat16", "full"
    c.mesh.fsdp, c.mesh.expert = -1, 64
    c.checkpoint.every = c.eval.every = 1000
    return c
