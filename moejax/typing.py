"""Array aliases and the project's dimension letters (level 0).

One meaning in the whole project. A small letter is this shard's share, or a smaller sibling.

=========  ================================  =======  ==========================================
``B T S``  sequences; query, key positions   ``E e``  all experts; experts on this shard
``M``      tokens flattened, ``B*T``         ``A R``  active experts a token; routed rows ``M*A``
``D V``    model width; vocabulary           ``F L``  expert or FFN width; latent width of the MoE
``N K``    query heads; key-value heads      ``H h``  query-key head width; value head width
``Q C``    query, key-value latents (MLA)    ``U u``  indexer heads; indexer head width
``J``      selected keys a query             ``G c``  chunks; positions in a chunk
``X``      residual sources, stacked layers  ``Z``    image patches
=========  ================================  =======  ==========================================
"""

from typing import Any, TypeAlias

import jax
from jaxtyping import Bool, Float, Int

Array: TypeAlias = jax.Array
PyTree: TypeAlias = Any

__all__ = ["Array", "Bool", "Float", "Int", "PyTree"]
