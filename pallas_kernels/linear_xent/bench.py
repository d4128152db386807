"""Time and temporaries of linear_xent beside the plain loss."""

import os
import time

import jax
import jax.numpy as jnp

from pallas_kernels.linear_xent import linear_xent

# tokens, vocabulary, width: one that fits a small test model, one with a large vocabulary
SHAPES = ((512, 512, 64), (2048, 512, 96), (2048, 32768, 256))
VARIANTS = {
    "default": {},
    "256 rows": {"rows_per_chunk": 256},
    "256 rows, vocabulary / 8": {"rows_per_chunk": 256, "vocab_per_chunk": 8},
}
REPEATS = 5


def temp_bytes(compiled) -> int:
    """Bytes of temporaries of a compiled function; 0 where the platform does not tell."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


def plain(x, weight, labels):
    """The loss from all logits at once."""
    logits = x @ weight.T
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - picked), labels.size


def mean_and_gradients(fn):
    """Mean loss with dx and dW."""

    def mean(x, weight, labels):
        loss, count = fn(x, weight, labels)
        return loss / count

    return jax.value_and_grad(mean, argnums=(0, 1))


def main() -> None:
    """Prints one line per shape and variant; runs take turns, the best of each counts."""
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {os.cpu_count()} cores, float32")
    print("tokens vocabulary width: milliseconds and MB of temporaries, ours / plain")
    for num_tokens, num_vocab, width in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        x = jax.random.normal(keys[0], (num_tokens, width))
        weight = jax.random.normal(keys[1], (num_vocab, width))
        labels = jax.random.randint(keys[2], (num_tokens,), 0, num_vocab)
        fns = {"plain": plain}
        for name, options in VARIANTS.items():
            options = dict(options)
            if "vocab_per_chunk" in options:
                options["vocab_per_chunk"] = num_vocab // options["vocab_per_chunk"]
            fns[name] = lambda *a, options=options: linear_xent(*a, **options)
        arguments = x, weight, labels
        compiled = {
            name: jax.jit(mean_and_gradients(fn)).lower(*arguments).compile()
            for name, fn in fns.items()
        }
        best = dict.fromkeys(compiled, float("inf"))
        for _ in range(REPEATS):
            for name, fn in compiled.items():
                start = time.perf_counter()
                jax.block_until_ready(fn(*arguments))
                best[name] = min(best[name], time.perf_counter() - start)
        memory = {n: temp_bytes(c) / 1e6 for n, c in compiled.items()}
        for name in VARIANTS:
            print(
                f"{num_tokens} {num_vocab} {width} {name}: "
                f"{best[name] * 1e3:.2f} / {best['plain'] * 1e3:.2f} ms, "
                f"{memory[name]:.1f} / {memory['plain']:.1f} MB"
            )


if __name__ == "__main__":
    main()
