"""Lowers functions for GPUs and TPUs that are not here: shows what a kernel may not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels.choose import lowering_for

_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}


def lowered(fn: Callable[..., Any], args: Sequence[jax.ShapeDtypeStruct], platform: str) -> str:
    """The program that the platform's compiler would get; nothing is compiled.

    Args:
      fn: a new function at every call (JAX caches traces of old ones).
      args: shapes of its arguments.
      platform: "gpu" or "tpu".
    """
    told = absent_gpu() if platform == "gpu" else contextlib.nullcontext()
    with lowering_for(platform), told:
        traced = jax.jit(fn).trace(*args)
        return traced.lower(lowering_platforms=(_PLATFORMS[platform],)).as_text()


@contextlib.contextmanager
def absent_gpu(kind: str = "NVIDIA H200", cores: int = 132) -> Iterator[None]:
    """From jax 0.11 on Pallas asks which GPU it lowers for; inside, it gets this answer."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=explicit, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
