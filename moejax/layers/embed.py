"""Token embedding and the output head (one table [V, D] each)."""

from __future__ import annotations

import jax
from flax import nnx
from jax.typing import DTypeLike

from moejax.layers.param import weight
from moejax.partitioning import batch_local
from moejax.typing import Array, Float, Int


class Embed(nnx.Module):
    """A [V, D] table: rows by token id. No scaling (architecture section 1.2)."""

    def __init__(self, vocab_size: int, dim: int, std: float, rngs: nnx.Rngs):
        self.table = weight(rngs, (vocab_size, dim), ("vocab", "embed"), std=std, matrix=None)

    def __call__(self, tokens_BT: Int[Array, "B T"], dtype: DTypeLike) -> Float[Array, "B T D"]:
        rows = batch_local(_rows, (0,), weights={1: self.table.get_metadata()["axes"]})
        return rows(tokens_BT, self.table[...].astype(dtype))


def _rows(tokens_BT: jax.Array, table_VD: jax.Array) -> jax.Array:
    return table_VD[tokens_BT]
