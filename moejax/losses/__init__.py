"""Next-token losses: the plain reference, and the one that never holds the logits."""

from moejax.losses.budget import LossPlan, plan_loss
from moejax.losses.chunked import chunked_cross_entropy
from moejax.losses.sharded_head import sharded_head_loss
from moejax.losses.xent import cross_entropy, mean_loss

__all__ = [
    "LossPlan",
    "chunked_cross_entropy",
    "cross_entropy",
    "mean_loss",
    "plan_loss",
    "sharded_head_loss",
]
