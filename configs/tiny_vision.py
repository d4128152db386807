"""A small model that learns to read handwritten digits on two cores in a quarter of an hour.

`python -m moejax.data.digits` writes the images; a tenth of the rows is text.
"""

from configs import base


def get_config():
    c = base.get_config()
    m = c.model
    m.name, m.vocab_size, m.num_layers, m.attn_res_block = "tiny_vision", 258, 2, 0
    m.attention, m.last_attention, m.kda.chunk = "kda,mla", "", 32
    m.moe.num_experts, m.moe.top_k = 8, 2
    m.vision.num_layers, m.vision.dim, m.vision.grid, m.vision.pad_token = 3, 64, 8, 257
    d = c.data
    d.tokenizer, d.seq_len, d.batch_size, d.image_patches = "byte", 128, 8, 256
    d.mixture = (
        {
            "name": "digits", "source": "webdataset", "paths": ("data/digits/train.tar",),
            "validation_paths": ("data/digits/validation.tar",), "weight": 0.9,
        },
        {"name": "text", "source": "synthetic", "weight": 0.1},
    )  # fmt: skip
    c.train.num_steps = 1500
    c.eval.every = c.checkpoint.every = 500
    c.eval.batches = 8
    return c
