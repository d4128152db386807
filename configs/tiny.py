"""Every feature of the family at toy size: 0.83 M parameters, trains on a laptop CPU in minutes."""

from configs import base


def get_config():
    c = base.get_config()
    c.mesh.fsdp, c.mesh.expert = 2, 4
    c.model.kda.chunk = 32  # heads of 16: a shorter chunk has less work inside it
    c.data.seq_len, c.data.batch_size = 256, 16
    c.eval.every, c.eval.batch_size = 200, 64
    return c
