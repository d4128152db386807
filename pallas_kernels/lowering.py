"""Lowers functions for GPUs and TPUs that are not here: shows what a kernel may not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from pallas_kernels.choose import lowering_for

# XLA's name of a platform, a device of it, and that device's multiprocessors or cores.
_PLATFORMS = {"gpu": ("cuda", "NVIDIA H200", 132), "tpu": ("tpu", "TPU v5", 2)}


def lowered(fn: Callable[..., Any], args: Sequence[jax.ShapeDtypeStruct], platform: str) -> str:
    """The program that the platform's compiler would get; nothing is compiled.

    Args:
      fn: a new function at every call (JAX caches traces of old ones).
      args: shapes of its arguments.
      platform: "gpu" or "tpu".
    """
    name, kind, cores = _PLATFORMS[platform]
    with lowering_for(platform), absent_device(name, kind, cores):
        return jax.jit(fn).trace(*args).lower(lowering_platforms=(name,)).as_text()


@contextlib.contextmanager
def absent_device(platform: str, kind: str, cores: int) -> Iterator[None]:
    """From jax 0.11 on Pallas asks what it lowers for; inside, it gets this answer.

    Args:
      platform: XLA's, "cuda" or "tpu".
      kind: of the device, as JAX names it.
      cores: multiprocessors of a GPU, cores of a TPU's device.
    """
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    explicit = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.AbstractMesh((1,), ("x",), axis_types=explicit, abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
