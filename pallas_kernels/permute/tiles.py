"""How much of permute and unpermute one program of a GPU does."""

from typing import NamedTuple


class Tiles(NamedTuple):
    """tokens: of a program. columns: handled at once, a power of two. warps: of a program."""

    tokens: int
    columns: int
    warps: int


def tiles_for(num_tokens: int, width: int, chip: str = "h200") -> Tiles:
    """Tiles for [num_tokens, width]; all are reasoned, none is measured on a GPU yet.

    Tokens: 8, so that a program has 8 reads of a slot in flight and no token waits for another;
    4,096 tokens still fill 132 multiprocessors four times. Columns: 512, for 8 x 512 values of 4
    warps are four loads of 16 bytes a thread in bfloat16, and 512 divides 3584 and 7168, so that
    K3's rows need no mask. Narrower rows take one part. Registers, not the chip, set both: every
    chip has the same.
    """
    del num_tokens, chip
    columns = min(512, _power_of_two(width))
    return Tiles(tokens=8, columns=columns, warps=4 if columns >= 128 else 1)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()
