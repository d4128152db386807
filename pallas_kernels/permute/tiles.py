"""How much of permute and unpermute one program of a GPU does."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """tokens: of a program. gradient_tokens: the same where unpermute's two gradients are formed.

    columns: handled at once, a power of two. warps: of a program.
    """

    tokens: int
    gradient_tokens: int
    columns: int
    warps: int


@tunable
def tiles_for(num_tokens: int, width: int, chip: str = "h200") -> Tiles:
    """Tiles for [num_tokens, width]; all are reasoned, none is measured on a GPU yet.

    Tokens: 8, so that a program has 8 reads of a slot in flight and no token waits for another;
    4,096 tokens still fill 132 multiprocessors four times. Columns: 512, for 8 x 512 values of 4
    warps are four loads of 16 bytes a thread in bfloat16, and 512 divides 3584 and 7168, so that
    K3's rows need no mask. Narrower rows take one part. The gradient keeps places, weights and dots
    of all slots of its tokens: with 8 tokens of 16 slots that is 246 registers a thread (compiled
    for an H200), with 4 it is 136, so that three programs share a multiprocessor instead of two.
    Registers, not the chip, set all of it: every chip has the same.
    """
    del num_tokens, chip
    columns = min(512, 1 << max(width - 1, 0).bit_length())
    return Tiles(tokens=8, gradient_tokens=4, columns=columns, warps=4 if columns >= 128 else 1)
