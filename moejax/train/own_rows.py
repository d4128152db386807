"""Which rows of a global batch a process makes: those that its devices hold."""

from __future__ import annotations

from moejax.train.state import Program
from moejax.train.step import batch_sharding


def own_rows(program: Program, batch_size: int, microbatches: int = 1) -> tuple[int, ...]:
    """Numbers of the rows whose places in the batch are on this process's devices.

    A global batch is cut into microbatches first and over the devices then, so that microbatch m
    is rows [m B/n, (m+1) B/n) however many processes there are. Where a mesh axis crosses hosts
    inside another (`mesh.dcn`) a process's rows do not stand together.

    Args:
      program: its mesh says where rows lie.
      batch_size: rows of the global batch.
      microbatches: it is cut into.
    Returns:
      Ascending, of all microbatches; what `put_batch` takes, in this order.
    """
    each = batch_size // microbatches
    shards = batch_sharding(program).addressable_devices_indices_map((microbatches, each))
    spans = {shard[1].indices(each) for shard in shards.values() if shard is not None}
    here = sorted({row for span in spans for row in range(*span)})
    return tuple(first + row for first in range(0, batch_size, each) for row in here)
