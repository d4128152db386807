"""Kimi K3.1 Pro with its vision tower, MoonViT-V2: 401 M parameters, and 46 M of the projector."""

from configs import kimi_k31


def get_config():
    c = kimi_k31.get_config()
    c.model.name = "kimi_k31_vision"
    v = c.model.vision
    v.num_layers, v.dim, v.num_heads, v.head_dim, v.mlp_dim = 27, 1024, 12, 128, 4096
    v.pad_token = 163605
    return c
