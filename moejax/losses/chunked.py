"""Cross entropy from hidden states, in chunks of tokens and vocabulary."""

from typing import Any

from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.linear_xent import linear_xent


def chunked_cross_entropy(
    hidden: Float[Array, "*batch D"],
    weight: Float[Array, "V D"],
    labels: Int[Array, "*batch"],
    **options: Any,
) -> tuple[Float[Array, ""], Int32[Array, ""]]:
    """`cross_entropy(hidden @ weight.T, labels)` without the logits, value and gradient.

    Args:
      hidden: after the final norm; leading dims are flattened to tokens.
      weight: output projection, one row per vocabulary entry.
      labels: each -100 (or `ignore`) or in [0, V); already aligned with `hidden`.
      options: keyword arguments of `pallas_kernels.linear_xent.linear_xent`.
    Returns:
      Sum over the labels that count, float32, and how many they are, int32.
    """
    return linear_xent(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), **options)
