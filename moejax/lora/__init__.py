"""Low-rank adapters: which maps get one, and what they are called in published files."""

from moejax.lora.maps import LinearMap, linear_maps
from moejax.lora.parts import adapted_parts
from moejax.lora.select import Selection, Target, select_adapters
from moejax.lora.table import adapter_rows, write_adapters

__all__ = [
    "LinearMap",
    "Selection",
    "Target",
    "adapted_parts",
    "adapter_rows",
    "linear_maps",
    "select_adapters",
    "write_adapters",
]
