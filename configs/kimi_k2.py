"""Kimi K2, 1.03 T parameters, 32 B active: DeepSeek-V3 with more experts, fewer heads and Muon."""

from configs import deepseek_v3


def get_config():
    c = deepseek_v3.get_config()
    m = c.model
    m.name, m.vocab_size = "kimi_k2", 163840
    m.mla.num_heads, m.mla.rope_theta = 64, 50000.0
    m.mla.yarn_factor, m.mla.yarn_beta_fast = 32.0, 1.0
    m.ffn.num_dense_layers = 1
    m.moe.num_experts, m.moe.num_groups, m.moe.top_groups = 384, 1, 1
    m.moe.route_scale = 2.827
    c.data.tokenizer = "tiktoken.model"
    c.optim.name, c.optim.lr, c.optim.adam_lr = "muon", 2e-4, 2e-4
    c.optim.schedule, c.optim.qk_clip = "wsd", 100.0
    return c
