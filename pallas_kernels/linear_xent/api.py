"""Public entry of linear_xent."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels import choose
from pallas_kernels.checks import (
    check_arrays,
    check_float,
    check_int,
    check_number,
    check_rank,
    is_int,
)
from pallas_kernels.dtypes import sum_dtype
from pallas_kernels.linear_xent import chunked, pallas_gpu, ref

_IMPLS: dict[str, Callable[..., Any]] = {
    "pallas_gpu": pallas_gpu.linear_xent,
    "chunked": chunked.linear_xent,
    "ref": ref.linear_xent,
}
# On GPUs too: three products of a library against four and atomic sums. The kernel is for memory.
_ORDER = {"cpu": ("chunked",)}


def linear_xent(
    x: Float[Array, "M _"],
    weight: Float[Array, "V _"],
    labels: Int[Array, "_"],
    *,
    ignore: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    rows_per_chunk: int | None = None,
    vocab_per_chunk: int | None = None,
    vocab_axis: str | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """Cross entropy of x @ weight.T, summed over the labels, without holding the logits.

    With l = x weight', or soft_cap * tanh(l / soft_cap), and Z = log sum exp l, per row:
        loss = Z - (1 - label_smoothing) l[label] - label_smoothing mean(l) + z_loss Z^2
    Divide the sum by the number of labels (over the global batch) for the mean. The gradient is
    formed together with the loss; when the weight is not differentiated its part is left out.

    Args:
      x: [M, D], bfloat16 or float32, M from 0; rows whose label is ignored may hold anything.
      weight: [V, D]; with `vocab_axis` this shard's rows of it, shards equal in size.
      labels: integers [M], each `ignore` or in [0, V), V counting all shards; already aligned.
      label_smoothing: in [0, 1).
      z_loss: factor of the squared log-partition, at least 0.
      soft_cap: positive bound of the logits, or None.
      rows_per_chunk, vocab_per_chunk: work sizes; neither need divide. They change memory, speed
        and rounding only. Without them the vocabulary is whole and rows fill 64 MiB of logits
        (at least 256 rows).
      vocab_axis: mesh axis over which `weight` is split, inside `jax.shard_map(check_vma=False)`.
        Gradients follow `lax.psum`'s convention there: correct when taken outside the shard_map.
      impl: None, "pallas_gpu", "chunked" or "ref"; None is chunked everywhere.
    Returns:
      Sum of the losses, float32 (float64 for such inputs), and the number of labels, int32.
    Raises:
      ValueError: shapes disagree, V or D is 0, a dtype is of another kind, or a number is outside
        its range.
    """
    check_rank("x", x, "M D+")
    check_rank("weight", weight, "V+ D+")
    check_rank("labels", labels, "M")
    check_arrays(x=x, weight=weight, labels=labels)
    check_float(x=x, weight=weight)
    check_int(labels=labels)
    if x.shape[1] != weight.shape[1] or x.shape[0] != labels.shape[0]:
        raise ValueError(
            f"x {x.shape}, weight {weight.shape}, labels {labels.shape} disagree. "
            "Give [M, D], [V, D] and [M]."
        )
    if not 0 <= check_number("label_smoothing", label_smoothing) < 1:
        raise ValueError(f"label_smoothing={label_smoothing} is outside [0, 1).")
    if check_number("z_loss", z_loss) < 0:
        raise ValueError(f"z_loss={z_loss} is not 0 or more. Use 0 for none.")
    if soft_cap is not None and check_number("soft_cap", soft_cap) <= 0:
        raise ValueError(f"soft_cap={soft_cap} is not positive. Use None for none.")
    for name, size in (("rows", rows_per_chunk), ("vocab", vocab_per_chunk)):
        if size is not None and not (is_int(size) and size >= 1):
            raise ValueError(
                f"{name}_per_chunk={size} is no integer from 1. Use None for the default."
            )
    options = {
        "ignore": ignore,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "rows_per_chunk": rows_per_chunk,
        "vocab_per_chunk": vocab_per_chunk,
        "vocab_axis": vocab_axis,
    }
    names = choose.candidates(_IMPLS, _ORDER, impl)
    if x.shape[0] == 0:  # nothing to sum
        return jnp.zeros((), sum_dtype(x, weight)), jnp.zeros((), jnp.int32)
    return choose.first_that_runs(_IMPLS, names, x, weight, labels, **options)
