"""LoRA of rank 8 on Kimi K3.1 with its vision tower: queries, keys, routers, and the tower's maps.

A row has room for four images of 1,024 tokens and as much text. Experts over 64 devices, the rest
of the model over two such groups: 128 devices.
"""

from configs import kimi_k31_lora


def get_config():
    c = kimi_k31_lora.get_config()
    c.model.name = "kimi_k31_vision_lora"
    v = c.model.vision
    v.num_layers, v.dim, v.num_heads, v.head_dim, v.mlp_dim = 27, 1024, 12, 128, 4096
    v.pad_token, v.max_patches = 163605, 4096
    c.lora.targets = ("q_proj", "k_proj", "gate", "wqkv", "wo", "fc0", "fc1")
    c.data.seq_len, c.data.image_patches = 8192, 16384
    return c
