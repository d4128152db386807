"""How many tokens one program of attn_res mixes, and how widely."""

from typing import NamedTuple

from pallas_kernels.tuning import tunable


class Tiles(NamedTuple):
    """tokens, gradient_tokens: that one program goes through. warps: of a GPU's program."""

    tokens: int
    gradient_tokens: int
    warps: int = 0


# On-chip memory of a TPU that blocks of sources, their gradients and copies in flight may take.
_TPU_BYTES = 8 * 2**20


@tunable
def tiles_for(num_sources: int, width: int, itemsize: int, chip: str = "h200") -> Tiles:
    """Tiles for sources [num_sources, tokens, width]; reasoned, not measured on a GPU or TPU.

    A GPU's program keeps whole rows in registers, so that a source is read once: at K3's 7168
    (8192 with its mask) 16 warps hold 16 values of a vector a thread. 8 tokens share one read of
    the query (28 KB, where the 9 sources of a token are 129 KB), and 8192 tokens still make 1024
    programs; in the gradient 16, for its partial sums of the query cost 28 KB a program.
    A TPU takes all sources of as many tokens as fit 8 MiB of its on-chip memory, twice for the
    copy in flight and twice for the gradient: 16 or more, as a bfloat16 tile has 16 rows.
    """
    if chip.startswith(("v", "tpu")):
        fitting = _TPU_BYTES // (4 * num_sources * width * itemsize)
        tokens = max(16, min(256, fitting // 16 * 16))
        return Tiles(tokens, tokens)
    warps = max(1, (1 << (width - 1).bit_length()) // 512)
    return Tiles(8, 16, warps=min(16, warps))
