"""What the images of a step cost a device: the vision tower's arithmetic and bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.config.vision import MERGE
from moejax.data.image_rows import ImageRoom
from moejax.models.flops import tower_flops, train_flops_per_token
from moejax.models.parts import flat_infos
from moejax.partitioning import num_batch_shards
from moejax.train.state import Program


class Tower(NamedTuple):
    """The tower in a step, on each device: the same on all, since every row has one buffer.

    Attributes:
      patches: of its rows' buffers.
      flops: forward and backward of the model's maths.
      share: of the step's.
      weight_bytes: of the tower and its projector at use, gathered whole.
      stored_bytes: of them between steps.
      feature_bytes: what takes the places of tokens; it stays on the device.
      batch_bytes: buffers of patches, and where they stand.
    """

    patches: int
    flops: float
    share: float
    weight_bytes: int
    stored_bytes: int
    feature_bytes: int
    batch_bytes: int


def tower_of(program: Program) -> Tower | None:
    """That of a program's step; None where rows have no images."""
    cfg = program.cfg
    room = ImageRoom.of(cfg.data, cfg.model.vision)
    if room is None:
        return None
    rows = cfg.data.batch_size / num_batch_shards(dict(program.mesh.shape))
    seq_len, size = cfg.data.seq_len, room.size
    tower = tower_flops(program.parts, size, program.trains).total
    step = seq_len * train_flops_per_token(program.parts, seq_len, program.trains, size)
    itemsize = jnp.dtype(cfg.train.compute_dtype).itemsize
    values, stored = 0, 0
    for info, leaf, where in zip(
        flat_infos(program.parts.infos), jax.tree.leaves(program.abstract.params),
        jax.tree.leaves(program.shardings.params), strict=True,
    ):  # fmt: skip
        if info.name.startswith("vision."):
            values += math.prod(leaf.shape)
            stored += math.prod(where.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    buffers = sum(
        math.prod(shape) * jnp.dtype(dtype).itemsize
        for shape, dtype in room.shapes(seq_len).values()
    )
    features = size // MERGE**2 * cfg.model.dim * itemsize
    return Tower(
        patches=round(rows * size), flops=rows * tower, share=tower / step,
        weight_bytes=values * itemsize, stored_bytes=stored,
        feature_bytes=round(rows * features), batch_bytes=round(rows * buffers),
    )  # fmt: skip
