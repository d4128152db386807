"""What the present device does at best: a slow card must not look like a slow kernel."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Ceilings(NamedTuple):
    """bytes_s: read and written by a copy. flops_s: of a bfloat16 product of square matrices."""

    bytes_s: float
    flops_s: float

    def floor_s(self, flops: float, num_bytes: float) -> float:
        """The least time of so many operations on so many bytes."""
        return max(flops / self.flops_s, num_bytes / self.bytes_s)


def measure(seconds: Callable[..., float], *, toy: bool) -> Ceilings:
    """Both, by the clock that the kernels are timed with."""
    rows, size = (64, 64) if toy else (2**15, 8192)
    keys = jax.random.split(jax.random.key(0), 4)

    def draw(key: jax.Array, shape: tuple[int, int]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    arrays = [draw(key, (rows, rows // 4)) for key in keys[:3]]
    copy = jax.jit(lambda x: -x).lower(arrays[0]).compile()
    num_bytes = 2 * arrays[0].nbytes
    copied = seconds(copy, [(x,) for x in arrays])
    squares = [draw(key, (size, size)) for key in keys]
    product = jax.jit(lambda a, b: a @ b).lower(*squares[:2]).compile()
    multiplied = seconds(product, list(zip(squares[:-1], squares[1:], strict=True)))
    return Ceilings(num_bytes / copied, 2 * size**3 / multiplied)


def card() -> dict[str, str]:
    """Name, memory and driver of NVIDIA's card; nothing where its tool is absent."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    fields = ("name", "driver_version", "memory.total", "clocks.max.sm", "power.limit")
    asked = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    values = (told.stdout.splitlines() or [""])[0].split(", ")
    return dict(zip(fields, values, strict=False)) if told.returncode == 0 else {}
