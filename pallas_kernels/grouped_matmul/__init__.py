"""Matmul of sorted rows with one weight per group, and the gated activation behind it."""

from pallas_kernels.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
