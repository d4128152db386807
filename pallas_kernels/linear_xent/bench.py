"""`linear_xent` beside the loss of all logits: `python -m pallas_kernels.linear_xent.bench`."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.benching.comparison import Comparison, print_all
from pallas_kernels.benching.device_case import DeviceCase
from pallas_kernels.benching.foreign import jla_xent
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


def device_cases(toy: bool) -> list[DeviceCase]:
    """The mean loss at K3's head."""
    tokens, width, vocab = (48, 32, 96) if toy else (4096, 7168, 163_840)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
        weight = jax.random.normal(keys[1], (vocab, width), jnp.bfloat16) * width**-0.5
        return x, weight, jax.random.randint(keys[2], (tokens,), 0, vocab)

    def call(*args: jax.Array, impl: str) -> jax.Array:
        return linear_xent(*args, impl=impl)[0] / tokens

    product = 2 * tokens * width * vocab
    return [
        DeviceCase(
            "linear_xent", f"{'toy' if toy else 'K3'} T{tokens} D{width} V{vocab}", make, call,
            argnums=(0, 1), flops=(product, 2 * product), tolerance=1e-2,
            others={
                "full logits": lambda *args: plain(*args)[0] / tokens,
                "jax-linear-attention": lambda *args: jla_xent(*args) / tokens,
            },
            torch=("liger",), dims={"T": tokens, "D": width, "V": vocab},
            target="forward + backward <= 1.2 x three products",
        )
    ]  # fmt: skip


if __name__ == "__main__":
    print_all(comparisons())
