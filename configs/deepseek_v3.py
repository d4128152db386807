"""DeepSeek-V3, 671 B parameters, 37 B active: V3.2 with attention over all positions."""

from configs import deepseek_v32


def get_config():
    c = deepseek_v32.get_config()
    c.model.name, c.model.attention = "deepseek_v3", "mla"
    c.optim.lr = c.optim.adam_lr = 2.2e-4
    c.mesh.fsdp, c.mesh.expert = -1, 8
    return c
