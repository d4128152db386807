"""Depthwise causal convolution over a few positions, state in and out."""

from pallas_kernels.short_conv.api import short_conv

__all__ = ["short_conv"]
