"""`linear_xent` beside the loss of all logits: `python -m pallas_kernels.linear_xent.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, print_all
from pallas_kernels.linear_xent import linear_xent

# tokens, vocabulary, width, rows of a chunk, and floors (times faster, times smaller)
_SHAPES = ((2048, 32768, 256, 256, 1, 6), (2048, 512, 96, None, None, None))


def comparisons() -> list[Comparison]:
    """The mean loss with the gradients of x and of the weight."""
    return [
        Comparison(
            "linear_xent", "forward + backward",
            f"T{tokens} D{width} V{vocab}" + (f" by {rows}" if rows else ""), "full logits",
            _mean_and_gradients(functools.partial(linear_xent, rows_per_chunk=rows)),
            _mean_and_gradients(plain), functools.partial(_make, tokens, vocab, width), faster,
            smaller,
        )
        for tokens, vocab, width, rows, faster, smaller in _SHAPES
    ]  # fmt: skip


def plain(x: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[jax.Array, int]:
    """The loss from all logits at once, and the number of labels."""
    logits = x @ weight.T
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked), labels.size


def _mean_and_gradients(fn):
    def mean(x, weight, labels):
        loss, count = fn(x, weight, labels)
        return loss / count

    return jax.value_and_grad(mean, argnums=(0, 1))


def _make(tokens: int, vocab: int, width: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, width))
    weight = jax.random.normal(keys[1], (vocab, width))
    return x, weight, jax.random.randint(keys[2], (tokens,), 0, vocab)


if __name__ == "__main__":
    print_all(comparisons())
