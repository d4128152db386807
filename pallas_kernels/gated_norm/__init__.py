"""RMSNorm with a weight and a sigmoid gate."""

from pallas_kernels.gated_norm.api import gated_norm

__all__ = ["gated_norm"]
