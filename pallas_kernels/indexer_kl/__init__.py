"""Loss that trains the lightning indexer."""

from pallas_kernels.indexer_kl.api import indexer_kl

__all__ = ["indexer_kl"]
