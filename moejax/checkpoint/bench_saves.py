"""What saving costs a run: `python -m moejax.checkpoint.bench_saves --config=small --saves=20`.

Saves the state of a config again and again, asynchronously as a run does, and prints for each save
how long it blocked, how long until it was on disk, and the memory of the process. A run that saves
every `checkpoint.every` steps of `step_s` seconds gives away `blocked / (every x step_s)`.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from moejax.checkpoint.manager import Checkpoints
from moejax.config import CheckpointConfig
from moejax.config.load import load_config
from moejax.models.parts import model_parts

_PAGE_BYTES = resource.getpagesize()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", default="small")
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--dir", help="where to (default: the system's folder for such files)")
    options = parser.parse_args(argv)
    shapes = model_parts(load_config(options.config, {}).model).params
    # Weights and two moments, as AdamW has them.
    state = {
        name: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, jnp.float32), shapes)
        for name in ("params", "mu", "nu")
    }
    state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    print(f"{options.config}: state of {state_bytes / 1e9:.2f} GB")
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for line in measure(state, pathlib.Path(folder), options.saves):
            print(line, flush=True)


def measure(state, folder: pathlib.Path, saves: int):
    """A line for each of so many saves, as they end."""
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=1, keep_best=False))
    for step in range(1, saves + 1):
        began = time.perf_counter()
        checkpoints.save(step, state, position={}, config={})
        blocked_s = time.perf_counter() - began
        checkpoints.wait()
        total_s = time.perf_counter() - began
        yield (
            f"save {step:3d}: blocked {blocked_s:7.3f} s, on disk after {total_s:7.2f} s, "
            f"resident {resident_bytes() / 1e6:9.1f} MB"
        )
    checkpoints.close()


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; Linux only."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


if __name__ == "__main__":
    main()
