"""Next-token losses: the plain reference, and the one that never holds the logits."""

from moejax.losses.chunked import chunked_cross_entropy
from moejax.losses.xent import cross_entropy, mean_loss

__all__ = ["chunked_cross_entropy", "cross_entropy", "mean_loss"]
