"""Kimi K3.1 Pro: K3 with a lightning indexer in its full-attention layers.

The indexer has 32 heads of 128, selects 2048 keys and rotates nothing.
"""

from configs import kimi_k3


def get_config():
    c = kimi_k3.get_config()
    m = c.model
    m.name, m.attention, m.last_attention = "kimi_k31", "kda,kda,kda,dsa", "dsa"
    m.dsa.num_heads, m.dsa.head_dim, m.dsa.top_k = 32, 128, 2048
    return c
