"""How many rows of gated_norm a program takes at once."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """rows: handled at once. blocks: of rows, one after the other, that share a sum of d_weight.

    warps: of a GPU's program.
    """

    rows: int
    blocks: int = 1
    warps: int = 0


@tunable
def tiles_for(num_rows: int, width: int, chip: str = "h200") -> Tiles:
    """Tiles for [num_rows, width]; reasoned, not measured on a GPU or TPU.

    GPU: 2048 values, 16 a thread of 4 warps, of each of five tensors: two loads of 16 bytes each.
    The gradient then takes 124 registers (compiled for an H200), four programs a multiprocessor;
    4096 values take 177, two programs. 16 blocks share a partial sum of the weight's gradient,
    whose 512 bytes stand beside 327 KB of rows.
    TPU: 1024 rows of 128, so that a step's blocks (2.6 MB, twice for the copies in flight) and its
    float32 values fit 16 MiB.
    """
    if chip.startswith(("v", "tpu")):
        rows = max(16, 2**17 // width // 16 * 16)
        return Tiles(min(rows, num_rows))
    size = 1 << max(width - 1, 1).bit_length()
    return Tiles(max(1, 2048 // size), 16, warps=4 if size >= 64 else 1)
