"""`permute` beside indices and `segment_sum`: `python -m pallas_kernels.permute.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, both_ways, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.permute import PermutePlan, permute, plan_permute, specs, unpermute

_CASE = specs.Case(num_tokens=2048, num_active=8, num_experts=64, width=256)


def comparisons() -> list[Comparison]:
    """Tokens to rows, and rows to tokens by their weights."""
    c = _CASE
    size, make = f"M{c.num_tokens} A{c.num_active} E{c.num_experts} L{c.width}", _make
    there = both_ways("permute", size, "x[idx]", permute_ours, by_index, make, argnums=(0,))
    make = functools.partial(_make, rows=True)
    back = both_ways(
        "permute", f"{size} back", "segment_sum", unpermute_ours, by_segments, make, argnums=(0, 1)
    )
    return [*there, *back]


def permute_ours(x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Tokens as rows sorted by expert, plan included."""
    return permute(x, plan_permute(ids, _CASE.num_experts))


def by_index(x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """The same by a sort and an index."""
    return x[jnp.argsort(ids.reshape(-1)) // ids.shape[1]]


def unpermute_ours(rows: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """Weighted sum of every token's rows, plan included."""
    return unpermute(rows, weights, plan_permute(ids, _CASE.num_experts))


def by_segments(rows: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
    """The same by a sort and a sum over segments."""
    order = jnp.argsort(ids.reshape(-1))
    scaled = rows * weights.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(scaled, order // ids.shape[1], ids.shape[0])


def _make(rows: bool = False) -> tuple[jax.Array, ...]:
    x, weights, ids = specs.make_inputs(_CASE)
    if rows:
        x = jnp.tile(x, (_CASE.num_active, 1))
    return x, weights, ids


def device_cases(toy: bool) -> list[DeviceCase]:
    """K3's routing: 16 of 896 experts for 8192 tokens; the plan is given."""
    tokens, active, experts, width = (24, 2, 5, 32) if toy else (8192, 16, 896, 3584)
    size = f"{'toy' if toy else 'K3'} M{tokens} A{active} E{experts} L{width}"
    num_rows, one = tokens * active, 2 * width

    def make(key: jax.Array, of_rows: bool) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (num_rows if of_rows else tokens, width), jnp.bfloat16)
        ids = jax.random.randint(keys[1], (tokens, active), 0, experts)
        weights = (jax.random.uniform(keys[2], (tokens, active)),) if of_rows else ()
        return (x, *weights, *plan_permute(ids, experts))

    def there(x: jax.Array, *plan: jax.Array, impl: str) -> jax.Array:
        return permute(x, PermutePlan(*plan), impl=impl)

    def back(rows: jax.Array, weights: jax.Array, *plan: jax.Array, impl: str) -> jax.Array:
        return unpermute(rows, weights, PermutePlan(*plan), impl=impl)

    def indexed(x: jax.Array, *plan: jax.Array) -> jax.Array:
        return x[plan[0] // active]

    def summed(rows: jax.Array, weights: jax.Array, *plan: jax.Array) -> jax.Array:
        scaled = rows * weights.reshape(-1)[plan[0]][:, None]
        return jax.ops.segment_sum(scaled, plan[0] // active, tokens).astype(rows.dtype)

    moved, target = (num_rows + tokens) * one, ">= 80 % of the copy"
    return [
        DeviceCase(
            "permute", size, functools.partial(make, of_rows=False), there, argnums=(0,),
            flops=(0, 0), tolerance=1e-2, least=(moved, moved), others={"x[idx]": indexed},
            target=target,
        ),
        DeviceCase(
            "permute", f"{size} back", functools.partial(make, of_rows=True), back, argnums=(0, 1),
            flops=(2 * num_rows * width, 4 * num_rows * width), tolerance=1e-2,
            least=(moved, (2 * num_rows + tokens) * one), others={"segment_sum": summed},
            target=target,
        ),
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
