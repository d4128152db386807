"""Lightning indexer: which keys a query of sparse attention reads."""

from pallas_kernels.lightning_indexer.api import lightning_indexer

__all__ = ["lightning_indexer"]
