"""Tokens a second of prefill and decoding, with random weights.

python -m moejax.generate.bench --config=small
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config.load import load_config
from moejax.generate.engine import Generator
from moejax.generate.sample import Sampling, make_draw
from moejax.models.parts import model_parts
from moejax.partitioning import make_mesh


class Speed(NamedTuple):
    """Tokens a second of one batch, summed over its rows; medians of the repeats."""

    batch: int
    prompt: int
    prefill: float
    decode: float
    step_ms: float


def measure(
    generator: Generator, params: dict, balance: dict, *, batch: int, prompt: int, steps: int,
    repeats: int = 5,
) -> Speed:  # fmt: skip
    """Times prefill of `batch` prompts of `prompt` tokens, and `steps` greedy steps after it."""
    prefill, step = generator.programs(True, 0)
    rng = np.random.default_rng(0)
    tokens_BT = rng.integers(0, generator.parts.cfg.vocab_size, (batch, prompt)).astype(np.int32)
    lengths_B, draw = np.full(batch, prompt, np.int32), make_draw(Sampling(), np.arange(batch))
    read, made = [], []
    with generator.context():
        for repeat in range(repeats + 1):
            start = time.perf_counter()
            args = (tokens_BT, lengths_B, draw, prompt + steps)
            token_B, cache = jax.block_until_ready(prefill(params, balance, *args))
            middle = time.perf_counter()
            for place in range(1, steps + 1):
                given_B = token_B
                token_B, cache = step(params, balance, token_B, cache, draw, np.int32(place))
                np.asarray(given_B)  # the host looks at every token, as in generation
            jax.block_until_ready(token_B)
            if repeat:  # the first compiles
                read.append(middle - start)
                made.append(time.perf_counter() - middle)
    step_s = statistics.median(made) / steps
    return Speed(
        batch, prompt, batch * prompt / statistics.median(read), batch / step_s, 1e3 * step_s
    )


def main() -> None:
    """Prints a line a batch size."""
    parser = argparse.ArgumentParser(prog="python -m moejax.generate.bench", description=__doc__)
    parser.add_argument("--config", default="tiny", help="a shipped config, or a config file")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=128, help="tokens after it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    cfg = load_config(options.config)
    parts = model_parts(cfg.model)
    params, balance = jax.jit(parts.init)(jax.random.key(0))
    mesh = make_mesh(cfg.mesh.replace(fsdp=-1, expert=1)) if jax.device_count() > 1 else None
    generator = Generator(parts, mesh=mesh, dtype=jnp.dtype(options.dtype))
    device = jax.devices()[0]
    print(f"{options.config}, {options.dtype}, {jax.device_count()} x {device.device_kind}")
    for batch in options.batch:
        speed = measure(
            generator, params, balance, batch=batch, prompt=options.prompt, steps=options.steps
        )
        print(
            f"batch {speed.batch}: prefill {speed.prefill:,.0f} tokens/s (prompts of "
            f"{speed.prompt}), decode {speed.decode:,.0f} tokens/s ({speed.step_ms:.2f} ms a step)"
        )


if __name__ == "__main__":
    main()
