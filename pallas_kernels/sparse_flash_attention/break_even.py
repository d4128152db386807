"""Up to which length a query's chosen keys are better masked than gathered.

Dense attention on expanded keys takes 2 (H + h) operations of a head for a key that is visible,
absorbed attention 2 (2 C + R) for one that is chosen: with K3.1's widths 640 and 2176. In a causal
row of T positions a query sees T / 2 keys on average, so that both do the same work where

    T = 2 J (2 C + R) / (H + h),

at J = 2048 that is 13.9 K positions. What an operation of the gather costs beside one of the dense
form is the table below.
"""

from pallas_kernels.checks import check_count, is_int
from pallas_kernels.choose import target_chip, target_platform

# Cost of an operation of the gathering kernel beside one of the dense kernel: of a platform, and of
# its chips that differ.
# NVIDIA: 64 of 96 heads make a tile, so that the second half is empty in a third of the work (4/3).
# TPUs have no kernel that gathers rows: XLA's form beside the dense kernel, with gradients, in the
# compiler's cycles for v5p (python -m moejax.planner.gather_cost); a v6e's gather is quicker.
# CPU: measured on two cores, with gradients, as README.md says.
SLOWDOWN = {"gpu": 4 / 3, "tpu": 9.9, "cpu": 2.0, "v6e": 3.6, "v6 lite": 3.6}

# Platforms by what chips are called, or by a part of what JAX calls their kind ("TPU v6 lite").
PLATFORMS = {
    "gpu": ("h100", "h200", "gb200", "b200", "nvidia", "gpu"),
    "tpu": ("v5p", "v5e", "v6e", "tpu7x", "tpu"), "cpu": ("cpu",),
}  # fmt: skip


def crossover(top_k: int, *, H: int, h: int, C: int, R: int, chip: str | None = None) -> int:
    """Longest causal row in which masked dense attention is to be used, at least `top_k`.

    Up to `top_k` positions every visible key is chosen, and dense attention needs not even a mask.

    Args:
      top_k: keys that a query chooses.
      H, h: channels of an expanded head's key and value.
      C, R: channels of the latent and of the rotated part.
      chip: what it runs on, "h200" or "NVIDIA H200"; that of `choose.target_chip` if None.
    Raises:
      ValueError: `chip` is unknown; a size is not positive (R may be 0).
      TypeError: a size is no integer.
    """
    top_k = check_count("crossover: top_k", top_k, 2**31 - 1)
    for name, size in {"H": H, "h": h, "C": C, "R": R}.items():
        if not (name == "R" and is_int(size) and size == 0):
            check_count(f"crossover: {name}", size, 2**31 - 1)
    platform = target_platform() if chip is None else _platform_of(chip)
    kind = target_chip() if chip is None else chip.lower()
    of_chip = (SLOWDOWN[name] for name in SLOWDOWN if name not in PLATFORMS and name in kind)
    slowdown = next(of_chip, SLOWDOWN[platform])
    return max(top_k, int(slowdown * 2 * top_k * (2 * C + R) / (H + h)))


def _platform_of(chip: str) -> str:
    names = {name: platform for platform, known in PLATFORMS.items() for name in known}
    found = [p for name, p in names.items() if isinstance(chip, str) and name in chip.lower()]
    if not found:
        raise ValueError(f"crossover: chip={chip!r} is unknown. Use one of {', '.join(names)}.")
    return found[0]
