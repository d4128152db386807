"""Tiles of the kernels of linear_xent."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """rows, vocab: of a tile of logits. width: of x and weight that a step of a product reads.

    gradient_vocab: vocab in the backward. splits: parts of the vocabulary whose programs do not
    wait for each other. warps, stages: of a program.
    """

    rows: int
    vocab: int
    gradient_vocab: int
    width: int
    splits: int
    warps: int
    stages: int


@tunable
def tiles_for(num_rows: int, num_vocab: int, width: int, chip: str = "h200") -> Tiles:
    """Tiles for x [num_rows, width] and weight [num_vocab, width]; not measured on a GPU.

    Logits: 128 x 256 on Hopper, the largest tile whose float32 sums (128 registers a thread of 8
    warps) leave room for the softmax, with 85 products a byte read; 128 x 128 in the backward, as
    256 spill there (200 bytes on an H200), and everywhere on Blackwell, where 256 spill in both.
    Steps of 64 are 128 bytes of bfloat16, a line of shared memory; three are in flight, 147 KB of
    232. Splits: about four programs a multiprocessor of 132, so that the last round leaves 3 % idle
    (4096 rows: 32 x 16 = 512 programs).
    """
    rows, vocab = _tile(num_rows, 128), _tile(num_vocab, 128 if chip.startswith("b") else 256)
    row_tiles, vocab_tiles = -(-num_rows // rows), -(-num_vocab // vocab)
    splits = max(1, min(vocab_tiles, 512 // row_tiles))
    warps = 8 if rows * vocab > 2**13 else 4
    return Tiles(rows, vocab, min(vocab, 128), _tile(width, 64), splits, warps, stages=3)


def _tile(size: int, most: int) -> int:
    """The least power of two that holds `size`, from 16 (a product's least) to `most`."""
    return max(16, min(most, 1 << max(size - 1, 1).bit_length()))
