"""Lightning indexer: which keys a query of sparse attention reads."""

from pallas_kernels.lightning_indexer.api import lightning_indexer
from pallas_kernels.lightning_indexer.choice import recall

__all__ = ["lightning_indexer", "recall"]
