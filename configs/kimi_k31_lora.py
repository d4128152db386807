"""LoRA of rank 8 on Kimi K3.1: queries and keys of the KDA layers and the routers.

Experts over 64 devices, the rest of the model over two such groups: 128 devices.
"""

from configs import kimi_k31


def get_config():
    c = kimi_k31.get_config()
    c.model.name = "kimi_k31_lora"
    c.lora.rank, c.lora.targets = 8, ("q_proj", "k_proj", "gate")
    c.mesh.fsdp, c.mesh.expert = 2, 64
    c.model.dsa.stage = "frozen"
    c.train.frozen_dtype = "bfloat16"
    c.optim.name, c.optim.qk_clip, c.optim.weight_decay = "adamw", 0.0, 0.0
    return c
