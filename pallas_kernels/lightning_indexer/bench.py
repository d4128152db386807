"""`lightning_indexer` beside its scores alone, and beside all scores at once.

python -m pallas_kernels.lightning_indexer.bench
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, print_all
from pallas_kernels.blocks import limit_by_bytes, scan_queries
from pallas_kernels.lightning_indexer import chunked, lightning_indexer, specs
from pallas_kernels.lightning_indexer.scores import scores_by_head

# The last queries of a row of 32 K keys; what a query costs does not depend on how many there are.
_LONG = specs.Case(1, 128, 32768, 32, 128, 2048)
_WHOLE = specs.Case(1, 1024, 1024, 32, 128, 128)


def comparisons() -> list[Comparison]:
    """The choice costs at most half as much again as the scores; no [T, S] ever exists."""
    rows = []
    for case, against, old, floors in (
        (_LONG, "scores alone", scores_alone, {"faster": 1 / 1.5}),
        (_WHOLE, "all scores at once", all_at_once, {"smaller": 8}),
    ):
        size = f"T{case.T} S{case.S} U{case.U} u{case.u} J{case.J}"
        rows.append(
            Comparison(
                "lightning_indexer",
                "forward",
                size,
                against,
                functools.partial(_index, case),
                functools.partial(old, case),
                functools.partial(_make, case),
                **floors,
            )  # fmt: skip
        )
    return rows


def _index(case: specs.Case, q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
    return _call(case, q, k, w)


def _call(case: specs.Case, q: jax.Array, k: jax.Array, w: jax.Array, impl: str | None = None):
    seg_q, seg_k = (jnp.ones((case.B, length), jnp.int32) for length in (case.T, case.S))
    return lightning_indexer(
        q, k, w, top_k=case.J, q_offset=case.S - case.T, segment_ids=seg_q, kv_segment_ids=seg_k,
        order="any", impl=impl,
    )  # fmt: skip


def scores_alone(case: specs.Case, q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
    """The same blocks of scores, of which the sum is kept."""

    def block(carry, start, blocks):
        q_BtUu, w_BtU = blocks
        return carry, (scores_by_head(q_BtUu, k, w_BtU).sum(-1),)

    limit = limit_by_bytes(4 * case.S, chunked.BUDGET, chunked.QUERY_BLOCK)
    return scan_queries(block, None, (q, w), limit)[1][0]


def all_at_once(case: specs.Case, q: jax.Array, k: jax.Array, w: jax.Array) -> jax.Array:
    """The reference: every head's scores, and a sort of every row."""
    return _call(case, q, k, w, impl="ref")


def _make(case: specs.Case) -> tuple[jax.Array, ...]:
    inputs = case.inputs()
    return tuple(inputs[name] for name in ("q_idx", "k_idx", "w_idx"))


if __name__ == "__main__":
    print_all(comparisons())
