"""Output projection and cross entropy without the logits."""

from pallas_kernels.linear_xent.api import linear_xent

__all__ = ["linear_xent"]
