"""Token sort by expert, its inverse, and the weighted combine."""

from pallas_kernels.permute.api import permute, unpermute
from pallas_kernels.permute.plan import PermutePlan, plan_permute

__all__ = ["PermutePlan", "permute", "plan_permute", "unpermute"]
