"""Absorbed MLA over the keys chosen for each query."""

from pallas_kernels.sparse_flash_attention.api import sparse_flash_attention, sparse_max_logit
from pallas_kernels.sparse_flash_attention.break_even import crossover

__all__ = ["crossover", "sparse_flash_attention", "sparse_max_logit"]
