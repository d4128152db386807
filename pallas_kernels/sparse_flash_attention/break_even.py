"""Up to which length a query's chosen keys are better masked than gathered.

Dense attention on expanded keys takes 2 (H + h) operations of a head for a key that is visible,
absorbed attention 2 (2 C + R) for one that is chosen: with K3.1's widths 640 and 2176. In a causal
row of T positions a query sees T / 2 keys on average, so that both do the same work where

    T = 2 J (2 C + R) / (H + h),

at J = 2048 that is 13.9 K positions. What an operation of the gather costs beside one of the dense
form is the table below.
"""

from pallas_kernels.choose import target_chip, target_platform

# Cost of an operation of the gathering kernel beside one of the dense kernel: of a platform, and of
# its chips that differ.
# NVIDIA: 64 of 96 heads make a tile, so that the second half is empty in a third of the work (4/3).
# TPUs have no kernel that gathers rows, and XLA's own fetches one row at a time: counted as 8.
# CPU: measured on two cores, with gradients, as README.md says.
SLOWDOWN = {"gpu": 4 / 3, "tpu": 8.0, "cpu": 2.0}


def crossover(top_k: int, *, H: int, h: int, C: int, R: int, chip: str | None = None) -> int:
    """Longest causal row in which masked dense attention is to be used, at least `top_k`.

    Up to `top_k` positions every visible key is chosen, and dense attention needs not even a mask.

    Args:
      top_k: keys that a query chooses.
      H, h: channels of an expanded head's key and value.
      C, R: channels of the latent and of the rotated part.
      chip: what it runs on, as `choose.target_chip` names it; that one if None.
    """
    chip = target_chip() if chip is None else chip
    slowdown = next((cost for name, cost in SLOWDOWN.items() if name in chip), None)
    slowdown = SLOWDOWN[target_platform()] if slowdown is None else slowdown
    return max(top_k, int(slowdown * 2 * top_k * (2 * C + R) / (H + h)))
