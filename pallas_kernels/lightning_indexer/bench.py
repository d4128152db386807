"""`lightning_indexer` beside its scores alone, and beside all scores at once.

python -m pallas_kernels.lightning_indexer.bench
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.blocks import limit_by_bytes, scan_queries
from pallas_kernels.lightning_indexer import chunked, lightning_indexer, pallas_gpu, specs
from pallas_kernels.lightning_indexer.choice import choose_keys
from pallas_kernels.lightning_indexer.pallas_gpu_scores import block_scores
from pallas_kernels.lightning_indexer.scores import ranked, scores_by_head
from pallas_kernels.lightning_indexer.tiles import tiles_for

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


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3.1's indexer at 32 K keys: a block of scores, the choice from one, and all together."""
    U, u, J, S = (2, 16, 40, 128) if toy else (32, 128, 2048, 32768)
    t, T = (64, 9) if toy else (256, 8192)
    name = "toy" if toy else "K3.1"

    def inputs(queries: int, key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        q = jax.random.normal(keys[0], (1, queries, U, u), jnp.bfloat16)
        k = jax.random.normal(keys[1], (1, S, u), jnp.bfloat16)
        return q, k, jax.random.normal(keys[2], (1, queries, U))

    def whole(q: jax.Array, k: jax.Array, w: jax.Array, impl: str) -> tuple[jax.Array, ...]:
        """Mean score of what is chosen, which near ties do not move, and the indices."""
        ones_q, ones_k = jnp.ones(q.shape[:2], jnp.int32), jnp.ones((1, S), jnp.int32)
        indices, scores = lightning_indexer(
            q, k, w, top_k=J, q_offset=S - q.shape[1], order="any", impl=impl,
            segment_ids=ones_q, kv_segment_ids=ones_k, return_scores=True,
        )  # fmt: skip
        return scores.mean(-1), indices

    def rows(key: jax.Array) -> tuple[jax.Array, ...]:
        return (ranked(jax.random.normal(key, (1, t, S)), jnp.bool_(True)),)

    pairs = lambda queries: queries * S - queries * (queries - 1) // 2  # noqa: E731
    block, every = 2 * U * u * pairs(t), 2 * U * u * pairs(T)
    return [
        DeviceCase(
            "lightning_indexer", f"{name} scores t{t} S{S} U{U} u{u}",
            functools.partial(inputs, t), _scores, argnums=(), flops=(block, block),
            tolerance=1e-2, target=">= 55 % of the product's ceiling",
        ),
        DeviceCase(
            "lightning_indexer", f"{name} choice t{t} S{S} J{J}", rows,
            functools.partial(_choice, J), argnums=(), flops=(0, 0), tolerance=1e-6,
            others={"lax.top_k": lambda x: jax.lax.top_k(x, J)}, target=">= 2 x lax.top_k",
        ),
        DeviceCase(
            "lightning_indexer", f"{name} both T{T} S{S} U{U} u{u} J{J}",
            functools.partial(inputs, T), whole, argnums=(), flops=(every, every), tolerance=1e-2,
            target="<= 1.4 x its scores; >= 3 x chunked",
        ),
    ]  # fmt: skip


def _scores(q: jax.Array, k: jax.Array, w: jax.Array, impl: str) -> jax.Array:
    """Scores [1, t, S] of the last queries, 0 where not visible."""
    (_, t, _, u), S = q.shape, k.shape[1]
    if impl.startswith("pallas"):
        seg_t, seg_S = (jnp.ones((1, n), jnp.int32) for n in (t, S))
        tiles = tiles_for(u, k.dtype.itemsize)
        scores = block_scores(q, k, w, seg_t, seg_S, jnp.int32(S - t), tiles)
    else:
        scores = scores_by_head(q, k, w)
    seen = jnp.arange(S) <= S - t + jnp.arange(t)[:, None]
    return jnp.where(seen, scores, 0)


def _choice(top_k: int, scores: jax.Array, impl: str) -> tuple[jax.Array, jax.Array]:
    """Scores and indices of the largest, by rising position."""
    if impl.startswith("pallas"):
        tiles = tiles_for(128, 2)
        indices, values = pallas_gpu.top_keys(scores, top_k, "position", tiles)
    else:
        indices, values = choose_keys(scores, top_k, "position", None)
    return values, indices


if __name__ == "__main__":
    print_all(comparisons())
