"""sparse_flash_attention on TPUs: what to use in place of a kernel."""

from typing import Any


def sparse_flash_attention(*args: Any, **options: Any) -> Any:
    """Raises NotImplementedError: rows of bfloat16 lie in memory in groups of 16."""
    raise NotImplementedError(
        "there is no Pallas kernel of this operator for tpu: it would have to fetch single rows, "
        "which lie there in groups of 16. mla_attention with indices masks the other keys instead"
    )
