"""Kimi Delta Attention: linear attention with a gated delta rule, state in and out."""

from pallas_kernels.kda.api import kda, kda_fused

__all__ = ["kda", "kda_fused"]
