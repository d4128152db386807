"""Absorbed MLA over the keys chosen for each query."""

from pallas_kernels.sparse_flash_attention.api import sparse_flash_attention, sparse_max_logit

__all__ = ["sparse_flash_attention", "sparse_max_logit"]
