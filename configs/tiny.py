"""Every feature of the family at toy size: 0.83 M parameters, trains on a laptop CPU in minutes."""

from configs import base


def get_config():
    c = base.get_config()
    c.mesh.fsdp, c.mesh.expert = 2, 4
    c.model.kda.chunk = 32
    return c
