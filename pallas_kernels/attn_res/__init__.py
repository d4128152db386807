"""Attention over depth: one learned mix of earlier residual streams per token."""

from pallas_kernels.attn_res.api import attn_res
from pallas_kernels.attn_res.two_phase import BankMix, merge_source, mix_bank, mix_two_phase

__all__ = ["BankMix", "attn_res", "merge_source", "mix_bank", "mix_two_phase"]
