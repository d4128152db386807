"""Names of kernel results that a rematerialisation policy may keep.

They are given where an operator's forward rule hands its residuals to the backward one: a name
outside would keep the result and still run the kernel again for what else the gradient reads.
"""

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

ATTENDED = "attended"  # softmax attention: output and log-sum-exp

T = TypeVar("T")


def saved(results: T, name: str) -> T:
    """The results (a pytree of arrays), known to `jax.checkpoint` policies by `name`."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), results)
