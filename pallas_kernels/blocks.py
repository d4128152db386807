"""What the chunked attention ops share: query blocks, visibility, row gathers and row sums.

Every function keeps the batch dimension first and never mixes it, so that a program sharded over
the batch needs no exchange here.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import checks

# The lse of a query that sees no key: exp(score - NO_KEY_LSE) is 0 for any finite score.
NO_KEY_LSE = 1e30


def accum_dtype(*arrays: jax.Array) -> jnp.dtype:
    """Dtype of sums and states: float32, or float64 if an input is."""
    double = any(array.dtype == jnp.float64 for array in arrays)
    return jnp.dtype(jnp.float64 if double else jnp.float32)


def split(length: int, limit: int) -> tuple[int, int]:
    """(number of blocks, block length), blocks at most `limit` long and as equal as can be."""
    num_blocks = max(1, math.ceil(length / limit))
    return num_blocks, math.ceil(length / num_blocks)


def limit_by_bytes(bytes_per_query: int, budget: int, most: int) -> int:
    """Queries in a block so that its temporaries stay within `budget` bytes: 8 to `most`."""
    return max(8, min(most, budget // max(1, bytes_per_query)))


def pad_dim1(x: jax.Array, length: int) -> jax.Array:
    """Lengthens dim 1: floats with 0, integers (segment ids, row indices) with -1, "nothing"."""
    extra = length - x.shape[1]
    if extra == 0:
        return x
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    widths = [(0, extra if dim == 1 else 0) for dim in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def scan_queries(
    body: Callable[[Any, jax.Array, tuple], tuple[Any, tuple]],
    carry: Any,
    xs: tuple[jax.Array, ...],
    limit: int,
) -> tuple[Any, tuple]:
    """Runs `body(carry, start, blocks) -> (carry, outputs)` over blocks of dim 1 of all `xs`.

    `start` is the block's first position. The last block may reach past the end: its extra rows are
    those of `pad_dim1`, and what `body` returns for them is cut off.
    """
    length = xs[0].shape[1]
    num_blocks, block = split(length, limit)
    if num_blocks == 1:
        return body(carry, jnp.int32(0), xs)
    xs = tuple(pad_dim1(x, num_blocks * block) for x in xs)

    def step(carry, index):
        start = index * block
        blocks = tuple(lax.dynamic_slice_in_dim(x, start, block, axis=1) for x in xs)
        return body(carry, start, blocks)

    carry, ys = lax.scan(step, carry, jnp.arange(num_blocks, dtype=jnp.int32))

    def join(y):
        y = jnp.moveaxis(y, 0, 1)
        return y.reshape(y.shape[0], num_blocks * block, *y.shape[3:])[:, :length]

    return carry, jax.tree.map(join, ys)


def zeros_of(like: jax.Array, shape: tuple[int, ...], dtype: Any, value: float = 0) -> jax.Array:
    """`value` of a shape, to start a loop's sums: varying over a shard_map's axes as `like` is.

    With `check_vma=True` a loop refuses sums that start as the same on all devices and do not stay
    so.
    """
    start = jnp.full(shape, value, dtype)
    axes = tuple(getattr(getattr(jax.typeof(like), "manual_axis_type", None), "varying", ()))
    return lax.pcast(start, axes, to="varying") if axes else start


def visible(
    seg_q_BT: jax.Array,
    seg_k_BS: jax.Array,
    pos_q_T: jax.Array,
    pos_k_S: jax.Array,
    causal: bool = True,
) -> jax.Array:
    """[B, T, S]: same document, not padding (ids below 1), and not in the future if causal."""
    seg_q, seg_k = seg_q_BT[:, :, None], seg_k_BS[:, None, :]
    same = (seg_q == seg_k) & (seg_q > 0)
    return same & (pos_k_S[None, :] <= pos_q_T[:, None]) if causal else same


def take_rows(rows_BSK: jax.Array, indices_BTJ: jax.Array) -> jax.Array:
    """rows[b, indices[b, t, j]] as [B, T, J, K]; zeros where the index is negative."""
    # A negative index would count from the end; one past the end is the one that fills.
    absent = rows_BSK.shape[1]
    indices = jnp.where(indices_BTJ < 0, absent, indices_BTJ)
    return jax.vmap(lambda rows, i: rows.at[i].get(mode="fill", fill_value=0))(rows_BSK, indices)


def add_rows(sums_BSK: jax.Array, indices_BTJ: jax.Array, updates_BTJK: jax.Array) -> jax.Array:
    """sums[b, indices[b, t, j]] += updates[b, t, j]; negative indices add nothing."""
    absent = sums_BSK.shape[1]
    indices = jnp.where(indices_BTJ < 0, absent, indices_BTJ)
    add = jax.vmap(lambda sums, i, update: sums.at[i].add(update, mode="drop"))
    return add(sums_BSK, indices, updates_BTJK)


def chosen_mask(indices_BTJ: jax.Array, num_rows: int) -> jax.Array:
    """[B, T, S]: whether row s is among the indices of query t."""
    indices = jnp.where(indices_BTJ < 0, num_rows, indices_BTJ)
    mark = lambda i: jnp.zeros(num_rows, bool).at[i].set(True, mode="drop")  # noqa: E731
    return jax.vmap(jax.vmap(mark))(indices)


def check_segments(
    op: str, name: str, segment_ids: jax.Array | None, shape: tuple[int, int]
) -> jax.Array:
    """Segment ids as int32 [B, T], ones if None. Raises ValueError for another shape or dtype."""
    if segment_ids is None:
        return jnp.ones(shape, jnp.int32)
    checks.check_array(f"{op}: {name}", segment_ids)
    if segment_ids.shape != shape:
        raise ValueError(
            f"{op}: {name} has shape {tuple(segment_ids.shape)}, allowed is {shape}. "
            f"Give one integer per position, 0 for padding."
        )
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"{op}: {name} is {segment_ids.dtype}; give integers, 0 for padding.")
    return segment_ids.astype(jnp.int32)


def check_both_segments(
    op: str,
    segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    batch: int,
    queries: int,
    keys: int,
) -> tuple[jax.Array, jax.Array]:
    """Segment ids of queries and keys, the queries' for both if only they are given."""
    if segment_ids is None and kv_segment_ids is not None:
        raise ValueError(f"{op}: kv_segment_ids without segment_ids. Give both, or neither.")
    if segment_ids is not None and kv_segment_ids is None:
        if queries != keys:
            raise ValueError(
                f"{op}: segment_ids alone serve as many keys as queries, not {keys} keys for "
                f"{queries} queries. Give kv_segment_ids too."
            )
        kv_segment_ids = segment_ids
    seg_q = check_segments(op, "segment_ids", segment_ids, (batch, queries))
    return seg_q, check_segments(op, "kv_segment_ids", kv_segment_ids, (batch, keys))


def check_shapes(op: str, dims: str, **arrays: jax.Array) -> dict[str, int]:
    """Sizes of the letters in `dims`, "q: B T+ N H; k: B S+ N H"; those with "+" are at least 1.

    Raises:
      ValueError: the shapes clash, or an array is neither bfloat16, float32 nor float64.
      TypeError: one is no array.
    """
    sizes: dict[str, int] = {}
    for clause in dims.split(";"):
        name, letters = (part.strip() for part in clause.split(":"))
        checks.check_array(f"{op}: {name}", arrays[name])
        shape, wanted = arrays[name].shape, letters.replace("+", "").split()
        known = [sizes.get(letter, size) for letter, size in zip(wanted, shape, strict=False)]
        if len(shape) != len(wanted) or tuple(known) != tuple(shape):
            spelt = " ".join(f"{a}={sizes[a]}" if a in sizes else a for a in wanted)
            raise ValueError(
                f"{op}: {name} has shape {tuple(shape)}, allowed is [{spelt}]. "
                f"Check the order of its dimensions against the other arguments."
            )
        sizes.update(zip(wanted, shape, strict=True))
        empty = [a[0] for a in letters.split() if a.endswith("+") and sizes[a[0]] < 1]
        if empty:
            raise ValueError(
                f"{op}: {name} has shape {tuple(shape)}; give [{' '.join(wanted)}] with "
                f"{empty[0]} at least 1."
            )
        if str(arrays[name].dtype) not in ("bfloat16", "float32", "float64"):
            raise ValueError(f"{op}: {name} is {arrays[name].dtype}; give bfloat16 or float32.")
    return sizes


def check_one_dtype(op: str, **arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays have one dtype."""
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    if len(set(dtypes.values())) > 1:
        raise ValueError(f"{op}: dtypes differ, {dtypes}. Cast them to one dtype first.")


def check_indices(op: str, indices: jax.Array, batch: int, queries: int, keys: int) -> jax.Array:
    """The indices as int32 [B, T, J], -1 where they name none of the keys.

    So every implementation sees the same empty slots.

    Raises:
      ValueError: `indices` is no array of signed integers [B, T, J], or J is 0.
    """
    checks.check_array(f"{op}: indices", indices)
    if indices.ndim != 3 or indices.shape[:2] != (batch, queries) or indices.shape[2] < 1:
        raise ValueError(
            f"{op}: indices has shape {tuple(indices.shape)}, allowed is "
            f"[B={batch} T={queries} J] with J at least 1. "
            f"Give a row of key positions per query, -1 for an empty slot."
        )
    if not jnp.issubdtype(indices.dtype, jnp.signedinteger):
        raise ValueError(f"{op}: indices is {indices.dtype}; give int32 (-1 marks an empty slot).")
    # compared in the wider of both dtypes: `keys` may not fit int8, nor what int64 holds int32
    wide = jnp.asarray(indices, np.promote_types(indices.dtype, np.int32))
    return jnp.where((wide >= 0) & (wide < keys), wide, -1).astype(jnp.int32)
