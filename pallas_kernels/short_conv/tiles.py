"""How much of a sequence and of its channels one program of short_conv's gradient takes."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """positions, channels: of a program. ahead: positions whose rows are on their way.

    warps: of a program.
    """

    positions: int
    channels: int
    ahead: int
    warps: int


@tunable
def tiles_for(length: int, channels: int, chip: str = "h200") -> Tiles:
    """Tiles for [length, channels]; reasoned, not measured on a GPU.

    Channels: 512 of 2 warps are 8 a thread, a load of 16 bytes in bfloat16; what a thread keeps of
    them (taps, their gradients and four positions) is what fills its registers. Positions: 128, so
    that the 2 (K - 1) more that a program reads at its ends are 5 % (K = 4), and 8192 x 12,288 make
    1536 programs. Ahead: 4, as one position is 2 KB of x and dy, and a multiprocessor should have
    some 30 KB on the way.
    """
    del chip
    size = min(512, 1 << max(channels - 1, 1).bit_length())
    return Tiles(min(128, length), size, 4, warps=max(1, size // 256))
