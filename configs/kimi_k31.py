"""Kimi K3.1 Pro: K3 with a lightning indexer (32 x 128, top 2048, no rotation) in its full-attention layers."""

from configs import kimi_k3


def get_config():
    c = kimi_k3.get_config()
    m = c.model
    m.name, m.attention, m.last_attention = "kimi_k31", "kda,kda,kda,dsa", "dsa"
    m.dsa.num_heads, m.dsa.head_dim, m.dsa.top_k = 32, 128, 2048
    return c
