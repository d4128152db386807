"""A model of the family that learns Python's standard library on two cores in 40 minutes.

About 3 M of its parameters are active in a token, a third of them in the head of 4,096 tokens.
"""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.dim, m.num_layers, m.vocab_size, m.attn_res_block = "mini", 224, 5, 4096, 2
    m.kda.num_heads, m.kda.head_dim, m.kda.value_head_dim, m.kda.chunk = 6, 32, 32, 32
    m.kda.decay_rank = m.kda.output_gate_rank = 32
    m.mla.num_heads, m.mla.q_latent, m.mla.kv_latent = 6, 64, 64
    m.mla.nope_dim, m.mla.rope_dim, m.mla.value_dim = 32, 16, 32
    m.dsa.num_heads, m.dsa.head_dim, m.dsa.top_k = 4, 32, 64
    m.ffn.dim = 448
    m.moe.num_experts, m.moe.top_k, m.moe.expert_dim, m.moe.latent_dim = 32, 4, 64, 112
    c.data.bpe_vocab_size, c.data.seq_len, c.data.batch_size = 4096, 512, 8
    c.train.num_steps = 1000
    c.eval.every = c.checkpoint.every = 250
    c.eval.batches = 8
    return c
