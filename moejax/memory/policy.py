"""What the backward pass keeps and what it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax

POLICIES = ("none", "full")


def remat(fn: Callable, policy: str) -> Callable:
    """`fn` under a rematerialisation policy.

    Args:
      policy: "none" keeps every intermediate; "full" keeps only the layer's inputs and runs it
        again.
    """
    if policy == "none":
        return fn
    return jax.checkpoint(fn, prevent_cse=False)
