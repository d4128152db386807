"""The batch of a step as shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from moejax.config import RunConfig
from moejax.data.image_rows import ImageRoom


def batch_shapes(
    cfg: RunConfig, where: jax.sharding.Sharding | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of everything in a batch, [microbatches, rows, ...].

    Args:
      cfg: of the run; `data` and `train.accumulation` are read.
      where: sharding of every array, see `moejax.train.step.batch_sharding`.
    """
    micro, seq_len = cfg.train.accumulation, cfg.data.seq_len
    lead = micro, cfg.data.batch_size // micro
    row: dict[str, tuple[tuple[int, ...], Any]] = {
        name: ((seq_len,), jnp.int32) for name in ("tokens", "labels", "segment_ids")
    }
    room = ImageRoom.of(cfg.data, cfg.model.vision)
    row |= room.shapes(seq_len) if room is not None else {}
    return {
        name: jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=where)
        for name, (shape, dtype) in row.items()
    }
