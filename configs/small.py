"""A small model of the same architecture: 223 M parameters, for a GPU or a patient workstation."""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.dim, m.num_layers, m.vocab_size, m.attn_res_block = "small", 512, 17, 32768, 4
    m.kda.num_heads, m.kda.head_dim, m.kda.value_head_dim = 8, 64, 64
    m.kda.decay_rank = m.kda.output_gate_rank = 64
    m.mla.num_heads, m.mla.q_latent, m.mla.kv_latent = 8, 192, 128
    m.mla.nope_dim, m.mla.rope_dim, m.mla.value_dim = 64, 32, 64
    m.dsa.num_heads, m.dsa.head_dim, m.dsa.top_k = 8, 64, 128
    m.ffn.dim = 1536
    m.moe.num_experts, m.moe.top_k, m.moe.expert_dim, m.moe.latent_dim = 64, 8, 192, 256
    c.data.tokenizer, c.data.bpe_vocab_size, c.data.seq_len, c.data.batch_size = (
        "bpe",
        8192,
        2048,
        32,
    )
    c.train.num_steps, c.train.remat = 10_000, "full"
    c.optim.lr, c.optim.adam_lr = 5e-3, 2e-3
    c.checkpoint.every = c.eval.every = 1000
    return c
