"""Time and temporaries of grouped_matmul beside `lax.ragged_dot`."""

import os
import time

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul import grouped_matmul

# experts, rows, K, F: the first holds the floors of 15 times the speed and a tenth of the memory
SHAPES = ((64, 4096, 256, 256), (16, 4096, 32, 64), (8, 1024, 32, 64), (4, 512, 32, 64))
REPEATS = 10


def temp_bytes(compiled) -> int:
    """Bytes of temporaries of a compiled function; 0 where the platform does not tell."""
    analysis = compiled.memory_analysis()
    return analysis.temp_size_in_bytes if analysis is not None else 0


def gradients(fn):
    """d rows and d weights of a smooth scalar."""
    return jax.grad(lambda rows, weights, sizes: jnp.sum(fn(rows, weights, sizes) ** 2), (0, 1))


def measure(fns, arguments):
    """Best time in ms and temporaries in MB of each function, run in turn."""
    compiled = {name: jax.jit(fn).lower(*arguments).compile() for name, fn in fns.items()}
    best = dict.fromkeys(compiled, float("inf"))
    for _ in range(REPEATS):
        for name, fn in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(fn(*arguments))
            best[name] = min(best[name], time.perf_counter() - start)
    memory = {n: temp_bytes(c) / 1e6 for n, c in compiled.items()}
    return {name: (best[name] * 1e3, memory[name]) for name in compiled}


def main() -> None:
    """Prints one line per shape, forward and with gradients."""
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {os.cpu_count()} cores, float32")
    print("E R K F: milliseconds and MB of temporaries, ours / ragged_dot (ratio)")
    for num_experts, num_rows, k_dim, f_dim in SHAPES:
        keys = jax.random.split(jax.random.key(0), 3)
        rows = jax.random.normal(keys[0], (num_rows, k_dim))
        weights = jax.random.normal(keys[1], (num_experts, k_dim, f_dim))
        ids = jax.random.randint(keys[2], (num_rows,), 0, num_experts)
        sizes = jnp.bincount(ids, length=num_experts).astype(jnp.int32)
        fns = {"ours": grouped_matmul, "ragged": jax.lax.ragged_dot}
        for label, wrap in (("forward", lambda fn: fn), ("gradients", gradients)):
            result = measure({n: wrap(fn) for n, fn in fns.items()}, (rows, weights, sizes))
            (ms, mb), (base_ms, base_mb) = result["ours"], result["ragged"]
            print(
                f"{num_experts} {num_rows} {k_dim} {f_dim} {label}: "
                f"{ms:.3f} / {base_ms:.3f} ms ({base_ms / ms:.1f}x), "
                f"{mb:.2f} / {base_mb:.2f} MB ({base_mb / max(mb, 1e-3):.1f}x)"
            )


if __name__ == "__main__":
    main()
