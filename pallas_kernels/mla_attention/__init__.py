"""Dense attention of expanded MLA."""

from pallas_kernels.mla_attention.api import max_logit, mla_attention

__all__ = ["max_logit", "mla_attention"]
