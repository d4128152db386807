"""Chunks of the loss out of a budget of memory: how many rows, how much vocabulary, and why."""

from __future__ import annotations

import math
from typing import NamedTuple

from pallas_kernels.linear_xent.sizes import chunk_sizes

# Below it the products with a piece of the head are too narrow to keep a chip's matrix units busy.
LEAST_VOCAB = 1024
_LEAST_ROWS = 256
# A piece's float32 gradient while it is scattered, in its own sizes: 11 in the program of a v5p
# (0.32 GiB for 1,024 entries of width 7,168), 2 in that of an H200.
_SCATTERED = 11


class LossPlan(NamedTuple):
    """How the loss goes through rows and vocabulary.

    Attributes:
      whole_head: the head is gathered whole; else in pieces of `vocab` entries, see `sharded_head`.
      rows, vocab: of a chunk.
      temp_bytes: what it takes beside arguments and results, on a device.
      reason: why so, in words.
    """

    whole_head: bool
    rows: int
    vocab: int
    temp_bytes: int
    reason: str


def plan_loss(
    num_rows: int, num_vocab: int, dim: int, *, itemsize: int, num_shards: int, trained: bool,
    budget: int, rows: int = 0, vocab: int = 0,
) -> LossPlan:  # fmt: skip
    """Chunk sizes whose temporaries stay within a budget.

    A head that fits is taken whole: that is three products and one gather. Otherwise it passes in
    pieces, four products, and is gathered twice for each chunk of rows; so the pieces are as narrow
    as products allow and the rows take the rest of the budget.

    Args:
      num_rows: of a device.
      num_vocab, dim: of the head.
      itemsize: bytes of a number in the compute dtype.
      num_shards: devices that share the head.
      trained: whether the head has a gradient.
      budget: bytes of temporaries on a device; 0 = as many as there are.
      rows, vocab: sizes that were asked for; 0 = chosen here.
    Returns:
      The plan; where not even the least chunks fit, it is these, and its `temp_bytes` and `reason`
      tell.
    """
    shape = (num_rows, num_vocab, dim, itemsize, num_shards, trained)
    sizes = chunk_sizes(num_rows, num_vocab, rows or None, vocab or None)
    needed = _whole_bytes(*shape, *sizes)
    if not budget or needed <= budget:
        why = f"within {_gib(budget)}" if budget else "no bound is set"
        return LossPlan(True, *sizes, needed, f"head whole: {_gib(needed)}, {why}")
    vocab = min(vocab or _piece(num_vocab), num_vocab)
    fixed = _piece_bytes(0, *shape[1:], vocab)
    a_row = _piece_bytes(1, *shape[1:], vocab) - fixed
    fitting = max((budget - fixed) // a_row, _LEAST_ROWS) // _LEAST_ROWS * _LEAST_ROWS
    rows = max(1, min(rows or _even(num_rows, fitting), num_rows))
    taken = _piece_bytes(rows, *shape[1:], vocab)
    reason = (
        f"head in pieces: whole it takes {_gib(needed)}, more than {_gib(budget)}; chunks of "
        f"{rows:,} rows and {vocab:,} entries take {_gib(taken)}, and the head is gathered "
        f"{2 * math.ceil(num_rows / rows)} times"
    )
    if taken > budget:
        reason += f"; less than {_LEAST_ROWS} rows would not pay, so the budget is exceeded"
    return LossPlan(False, rows, vocab, taken, reason)


def _piece(num_vocab: int) -> int:
    """The narrowest piece that divides the vocabulary; the narrowest of all where none does."""
    widths = range(LEAST_VOCAB, 2 * LEAST_VOCAB + 1)
    return next((width for width in widths if num_vocab % width == 0), LEAST_VOCAB)


def _even(num_rows: int, most: int) -> int:
    """Rows of a chunk, at most `most`: the largest divisor that is not tiny, as padding copies all.

    Where there is none, chunks that are as good as equal.
    """
    chunks = math.ceil(num_rows / most)
    even = (n for n in range(chunks, 2 * chunks + 1) if num_rows % n == 0)
    return math.ceil(num_rows / next(even, chunks))


def _whole_bytes(
    num_rows: int, num_vocab: int, dim: int, itemsize: int, num_shards: int, trained: bool,
    rows: int, vocab: int,
) -> int:  # fmt: skip
    """Gathered head, its gradient unscattered, one block of logits, the rows' gradient."""
    head = num_vocab * dim * ((itemsize if num_shards > 1 else 0) + (4 if trained else 0))
    return head + rows * vocab * 4 + rows * dim * 4 + num_rows * dim * itemsize


def _piece_bytes(
    rows: int, num_vocab: int, dim: int, itemsize: int, num_shards: int, trained: bool, vocab: int
) -> int:
    """Two pieces of the head (one on its way), its gradient, logits and theirs, the rows' sums."""
    piece = vocab * dim * (2 * itemsize + (_SCATTERED * 4 if trained else 0))
    return piece + rows * (vocab * (2 * 4 + itemsize) + dim * (4 + itemsize))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
